"""The contract of a trainer's weights: checkpoints, exports and streams hold the weights that it computes with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chatlearn_core.exceptions import CheckpointError, ModelError, WeightSyncError
from chatlearn_core.metrics.durable_files import file_facts
from chatlearn_core.plugins.records import Channel
from chatlearn_core.protocols import WeightLoader, WeightTakingTrainer
from chatlearn_core.types import BoxCover, TrainBatch, WeightManifest, WeightShard
from chatlearn_core.types.boxes import full_box, slices
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.batches import MaskedPolicyLoss, make_batch, reference_logprobs, sequences
from chatlearn_testing.model_directory import copy_with_weights, manifest_of, read_checkpoint
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, ReferenceLoader
from chatlearn_testing.suites.trainer_fixtures import (
    MakeTrainer,
    TrainerFixtures,
    assert_close,
    logprobs_of,
    stream,
    whole_manifest,
)


class TrainerWeightsContract(TrainerFixtures, ConformanceSuite):
    """The part of ``TrainerConformance`` about weights."""

    def test_save_and_load_continue_bit_identically(
        self, make_trainer: MakeTrainer, batch: TrainBatch, tmp_path: Path
    ) -> None:
        """A new trainer that loads a checkpoint makes the same next step as the trainer that saved it, bit for bit.

        Equal weights after loading but not after the step: optimizer state, schedule or step count was not saved.
        """
        trainer, loss = make_trainer(), MaskedPolicyLoss()
        prepared = loss.prepare(batch)
        trainer.update(prepared, loss)
        trainer.save(tmp_path / "checkpoint")
        resumed = make_trainer()
        resumed.load(tmp_path / "checkpoint")
        for step in ("after loading", "after the next step"):
            expected, found = stream(trainer), stream(resumed)
            different = [name for name in expected if not torch.equal(expected[name], found[name])]
            assert not different, f"{step}, these differ: {', '.join(different)}"
            continued, again = trainer.update(prepared, loss), resumed.update(prepared, loss)
            assert continued["loss"] == again["loss"]
            assert continued["grad_norm"] == again["grad_norm"]

    def test_what_is_told_of_saved_files_is_true(self, make_trainer: MakeTrainer, tmp_path: Path) -> None:
        """``save`` returns the true size and SHA-256 of files that it wrote; a run seals its checkpoint with these.

        ``save`` may omit files. The run then reads them, which is correct but slower.
        """
        told = make_trainer().save(tmp_path / "checkpoint")
        assert isinstance(told, Mapping), f"save returned a {type(told).__name__}; return a mapping, which may be empty"
        assert told == file_facts(tmp_path / "checkpoint", told), "the files differ from the sizes or hashes of save"

    def test_a_model_is_loaded_in_place(
        self, make_trainer: MakeTrainer, batch: TrainBatch, model_directory: Path, tmp_path: Path
    ) -> None:
        """After ``load_model`` a trained trainer equals a new one that starts from that directory, step for step.

        Equal weights but another next step: optimizer state or the schedule's update count was kept.
        """
        teacher, trainer, loss = make_trainer(), make_trainer(), MaskedPolicyLoss()
        prepared = loss.prepare(batch)
        for _ in range(2):
            teacher.update(prepared, loss)
        trainer.update(prepared, loss)
        teacher.export_model(tmp_path / "model")
        trainer.load_model(tmp_path / "model")
        fresh = make_trainer(path=tmp_path / "model")
        for step in ("after loading", "after the next step"):
            expected, found = stream(fresh), stream(trainer)
            different = [name for name in expected if not torch.equal(expected[name], found[name])]
            assert not different, f"{step}, these differ: {', '.join(different)}"
            assert fresh.update(prepared, loss)["grad_norm"] == trainer.update(prepared, loss)["grad_norm"]

    def test_models_are_averaged_as_they_are_loaded(
        self, make_trainer: MakeTrainer, batch: TrainBatch, tmp_path: Path
    ) -> None:
        """After loading two models with ``decay`` d, weights are d^2 own + d (1 - d) first + (1 - d) second.

        Other values: ``decay`` is ignored, or is the share of the loaded model instead of the own one.
        """
        teacher, follower, loss, decay = make_trainer(), make_trainer(trainable=False), MaskedPolicyLoss(), 0.75
        expected = {name: tensor.double() for name, tensor in stream(follower).items()}
        for number in range(2):
            teacher.update(loss.prepare(batch), loss)
            teacher.export_model(tmp_path / f"{number}")
            for name, tensor in stream(teacher).items():
                expected[name] = decay * expected[name] + (1 - decay) * tensor.double()
            follower.load_model(tmp_path / f"{number}", decay=decay)
        for name, tensor in stream(follower).items():
            assert_close(tensor, expected[name].to(tensor.dtype), name)

    @pytest.mark.parametrize("channel", ["tensors", "boxes"])
    @pytest.mark.parametrize("decay", [0.0, 0.75])
    def test_weights_of_another_trainer_are_taken(
        self, make_trainer: MakeTrainer, batch: TrainBatch, channel: Channel, decay: float
    ) -> None:
        """After two syncs through ``weight_loader``, decay 0 gives the sender's weights bit for bit, and decay d gives
        d^2 own + d (1 - d) first + (1 - d) second. A sync with a missing tensor is refused.

        Other values: a box is misplaced or blended twice, or ``decay`` is the share of the sender's weights.
        """
        if channel not in self.record().channels:
            not_applicable(f"the record does not declare the channel {channel!r}")
        teacher, follower, loss = make_trainer(), make_trainer(trainable=False), MaskedPolicyLoss()
        assert isinstance(follower, WeightTakingTrainer), "the record declares channels; weight_loader is missing"
        loader = follower.weight_loader(decay)
        assert loader is not None, "weight_loader is None for a model of this suite, but the record declares channels"
        manifest = whole_manifest(teacher)
        expected = {name: tensor.double() for name, tensor in stream(follower).items()}
        for version in (1, 2):
            teacher.update(loss.prepare(batch), loss)
            asyncio.run(_take(loader, version, manifest, stream(teacher), channel))
            for name, tensor in stream(teacher).items():
                expected[name] = decay * expected[name] + (1 - decay) * tensor.double()
        for name, tensor in stream(follower).items():
            if decay:
                torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-6, msg=name)
            else:
                assert torch.equal(tensor, stream(teacher)[name]), name
        some = dict(list(stream(teacher).items())[:-1])
        with pytest.raises(WeightSyncError):
            asyncio.run(_take(loader, 3, manifest, some, channel))

    def test_another_model_is_not_loaded(self, make_trainer: MakeTrainer, tmp_path: Path) -> None:
        """``load_model`` of a directory without the model raises a ``ModelError`` and leaves the weights unchanged."""
        trainer = make_trainer()
        before = stream(trainer)
        (tmp_path / "empty").mkdir()
        with pytest.raises(ModelError):
            trainer.load_model(tmp_path / "empty")
        assert all(torch.equal(tensor, before[name]) for name, tensor in stream(trainer).items())

    def test_an_incomplete_checkpoint_is_refused(self, make_trainer: MakeTrainer, tmp_path: Path) -> None:
        """An incomplete checkpoint raises a ``CheckpointError`` that names it; a run then uses an earlier one."""
        (tmp_path / "empty").mkdir()
        with pytest.raises(CheckpointError) as caught:
            make_trainer().load(tmp_path / "empty")
        assert "empty" in str(caught.value)

    def test_manifest_has_the_names_of_the_model_directory(
        self, make_trainer: MakeTrainer, model_directory: Path
    ) -> None:
        """The manifest has the names of ``save_pretrained``: experts unfused, tied weights once, no prefixes."""
        manifest = whole_manifest(make_trainer())
        lines = manifest.differences(manifest_of(read_checkpoint(model_directory), manifest.aliases))
        assert not lines, "\n".join(lines)
        assert not manifest.aliases.keys() & manifest.tensors.keys(), "an alias is streamed as a tensor of its own"

    def test_manifest_describes_the_stream(self, make_trainer: MakeTrainer) -> None:
        """The stream yields every tensor once, whole, with the name, shape and dtype that the manifest announces."""
        trainer = make_trainer()
        manifest = whole_manifest(trainer)
        shards = list(trainer.weights("full_tensors"))
        names = [shard.name for shard in shards]
        assert sorted(names) == sorted(manifest.tensors), "streamed and announced names differ"
        for shard in shards:
            spec = manifest.tensors[shard.name]
            assert shard.is_whole, f"{shard.name} is not whole: box {shard.box} of {shard.global_shape}"
            assert shard.owner_rank == 0, f"{shard.name} is owned by rank {shard.owner_rank} of one: no rank sends it"
            found = (tuple(shard.tensor.shape), shard.global_shape, str(shard.tensor.dtype).removeprefix("torch."))
            assert found == (spec.shape, spec.shape, spec.dtype), f"{shard.name}: {found} streamed, {spec} announced"

    def test_boxes_cover_every_tensor_once(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """Export ``boxes``: the boxes cover every element of every tensor exactly once, and they follow updates.

        A box with other values: its position is wrong, or its values are those before the update.
        """
        if "boxes" not in self.record().exports:
            not_applicable("the record does not declare the export 'boxes'")
        trainer, loss = make_trainer(), MaskedPolicyLoss()
        for when in ("at the start", "after an update"):
            whole = stream(trainer)
            covers = {name: BoxCover(tuple(tensor.shape)) for name, tensor in whole.items()}
            for shard in trainer.weights("boxes"):
                what = f"{shard.name}, {when}: box {shard.box}"
                assert shard.owner_rank == 0, f"{what} is owned by rank {shard.owner_rank} of one: no rank sends it"
                assert (refusal := covers[shard.name].add(shard.box)) is None, f"{what}: {refusal}"
                assert torch.equal(shard.tensor.cpu(), whole[shard.name][slices(shard.box)]), f"{what} differs"
            lacking = {name: cover.missing() for name, cover in covers.items() if not cover.is_complete}
            assert not lacking, f"{when}, these elements are in no box: {lacking}"
            trainer.update(loss.prepare(batch), loss)

    def test_streamed_tensors_outlive_the_step_of_the_stream(self, make_trainer: MakeTrainer) -> None:
        """A yielded tensor keeps its values while the stream continues, because senders hold a bucket of tensors.

        Values of a later tensor: the trainer gathers all tensors into one buffer.
        """
        trainer = make_trainer()
        held: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for shard in trainer.weights("full_tensors"):
            held.append((shard.name, shard.tensor, shard.tensor.detach().clone()))
        changed = [name for name, tensor, before in held if not torch.equal(tensor, before)]
        assert not changed, f"these changed while the stream went on: {', '.join(changed)}"

    def test_stream_starts_as_the_model_directory(self, make_trainer: MakeTrainer, model_directory: Path) -> None:
        """Before any update, the stream yields the model directory's tensors, bit for bit."""
        expected, found = read_checkpoint(model_directory), stream(make_trainer())
        different = [name for name in found if name in expected and not torch.equal(expected[name], found[name])]
        assert not different, f"these differ from the model directory: {', '.join(different)}"

    def test_stream_and_export_follow_updates(
        self,
        make_trainer: MakeTrainer,
        batch: TrainBatch,
        model_directory: Path,
        load_plain: ReferenceLoader,
        tmp_path: Path,
    ) -> None:
        """After every update, stream and export hold the weights that the trainer now computes with.

        Old weights in the stream: a cache or gathered copies were not refreshed after the optimizer step.
        """
        trainer, loss = make_trainer(), MaskedPolicyLoss()
        for step in range(2):
            trainer.update(loss.prepare(batch), loss)
            computed = logprobs_of(trainer, batch)
            trainer.export_model(tmp_path / f"export-{step}")
            streamed = copy_with_weights(model_directory, stream(trainer), tmp_path / f"stream-{step}")
            for what, directory in (("the export", tmp_path / f"export-{step}"), ("the stream", streamed)):
                plain = load_plain(directory)
                with torch.no_grad():
                    expected = [reference_logprobs(plain, ids) for ids in sequences(batch, batch.token_ids)]
                assert_close(
                    torch.cat(expected) * batch.loss_mask, computed, f"logprobs from {what} after update {step + 1}"
                )

    def test_export_is_a_model_directory(
        self, make_trainer: MakeTrainer, model_directory: Path, reference: torch.nn.Module, tmp_path: Path
    ) -> None:
        """An export is a model directory with the same names and configuration, from which a trainer computes the same
        logprobs. Without ``model_type`` in its ``config.json``, no other tool can load it.
        """
        make_trainer().export_model(tmp_path / "export")
        configurations = []
        for directory in (model_directory, tmp_path / "export"):
            assert (directory / "config.json").is_file(), f"{directory} has no config.json"
            configurations.append(json.loads((directory / "config.json").read_text(encoding="utf-8")))
        for key in ("model_type", "vocab_size"):
            own, exported = (configuration.get(key) for configuration in configurations)
            assert own == exported, f"config.json of the export has {key} {exported!r} instead of {own!r}"
        expected, found = read_checkpoint(model_directory), read_checkpoint(tmp_path / "export")
        assert not (lines := manifest_of(expected).differences(manifest_of(found))), "\n".join(lines)
        with torch.no_grad():
            batch = make_batch(reference(torch.zeros(1, dtype=torch.int64)).shape[-1], seed=1)
        again = logprobs_of(make_trainer(path=tmp_path / "export"), batch)
        assert_close(again, logprobs_of(make_trainer(), batch), "logprobs")


async def _take(
    loader: WeightLoader, version: int, manifest: WeightManifest, tensors: Mapping[str, Tensor], channel: Channel
) -> None:
    """Load one sync, with each tensor whole, or as two boxes along its first dimension in separate calls."""
    await loader.begin(version, manifest)
    if channel == "tensors":
        await loader.load_tensors(tensors.items())
    else:
        for half in (1, 0):
            shards = []
            for name, tensor in tensors.items():
                whole = full_box(tensor.shape)
                middle = tensor.shape[0] // 2
                box = ((middle, tensor.shape[0]) if half else (0, middle), *whole[1:])
                shards.append(WeightShard(name, tuple(tensor.shape), box, 0, tensor[slices(box)]))
            await loader.load_boxes(shards)
    assert await loader.finish() == version, "finish returns the version that begin announced"
