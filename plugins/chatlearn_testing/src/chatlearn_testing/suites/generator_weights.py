"""The contract of a generator's weight loading: new weights are complete and correct, or the replica does not serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chatlearn_core.exceptions import BackendError, WeightSyncError
from chatlearn_core.plugins.compatibility import kv_after_sync_of
from chatlearn_core.types import Completion, ReplicaState, TensorSpec, WeightManifest, WeightShard
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.model_directory import manifest_of, read_checkpoint
from chatlearn_testing.reused_memory import ReusedMemoryLoader
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.generator_fixtures import (
    ABSOLUTE,
    LONG,
    PROMPTS,
    GeneratorFixtures,
    Replica,
    ask,
    ask_score,
    assert_completion,
    plain_greedy,
    plain_logprobs,
)

DRIVEN_CHANNELS = ("tensors", "boxes", "checkpoint")
"""Channels that the suite can drive without a transport."""


class GeneratorWeightsContract(GeneratorFixtures, ConformanceSuite):
    """The part of ``GeneratorConformance`` about weights (invariant 4 of the design)."""

    def test_expects_the_names_of_the_model_directory(self, replica: Replica, tensors: Mapping[str, Tensor]) -> None:
        """``expected_manifest`` has the checkpoint's names, shapes and dtypes; tied weights are aliases."""
        expected = replica.generator.loader.expected_manifest()
        assert not (lines := expected.differences(manifest_of(tensors, expected.aliases))), "\n".join(lines)

    def test_reloading_the_same_weights_changes_nothing(
        self, synced: Replica, reference: torch.nn.Module, tensors: Mapping[str, Tensor]
    ) -> None:
        """Reloading the model directory's own weights gives the same completions under a new version.

        An engine that fuses, transposes or quantises weights on loading must apply this to the new weights only.
        """
        version = synced.generator.policy_version + 1
        assert synced.sync(tensors, version) == version
        self._assert_serves(synced, reference, version)

    @pytest.mark.parametrize("channel", DRIVEN_CHANNELS)
    def test_new_weights_change_the_output(
        self, synced: Replica, new_reference: torch.nn.Module, new_model: Path, channel: str
    ) -> None:
        """After a sync, greedy output equals a plain forward with the new weights, and every token has the new version.

        Some prompts new, others old: a prefix cache survived the sync. Output unchanged: tied or packed weights were
        not updated. A wrong version: it is recorded when a request arrives instead of when a token is sampled.
        """
        if channel not in self.record().channels:
            not_applicable(f"the record does not declare the channel {channel!r}")
        new = read_checkpoint(new_model)
        loader = ReusedMemoryLoader(synced.generator.loader)
        version = synced.generator.policy_version + 1
        synced.ask(*(ask(f"warm-{i}", prompt) for i, prompt in enumerate(PROMPTS)))

        async def load() -> int:
            await loader.begin(version, manifest_of(new, loader.expected_manifest().aliases))
            if channel == "tensors":
                names = sorted(new, reverse=True)
                await loader.load_tensors((name, new[name]) for name in names[::2])
                await loader.load_tensors((name, new[name]) for name in names[1::2])
            elif channel == "boxes":
                await loader.load_boxes(shard for name in sorted(new) for shard in _halves(name, new[name]))
            else:
                await loader.load_checkpoint(new_model)
            return await loader.finish()

        assert synced.run(load()) == version, "finish confirmed another version"
        self._assert_serves(synced, new_reference, version)

    def test_tensors_that_were_given_are_not_kept(
        self, synced: Replica, new_reference: torch.nn.Module, new_model: Path, tensors: Mapping[str, Tensor]
    ) -> None:
        """The generator copies weights into its own memory; the suite overwrites tensors after ``load_tensors``.

        Garbage, or weights of a later version: the generator keeps references to the given tensors instead of copying
        their values. Transports reuse their buffers, and a trainer in the same process keeps updating its tensors.
        """
        if "tensors" not in self.record().channels:
            not_applicable("the record does not declare the channel 'tensors'")
        version = synced.generator.policy_version + 1
        synced.sync(tensors, version)
        synced.sync(read_checkpoint(new_model), version + 1)
        self._assert_serves(synced, new_reference, version + 1)

    def test_an_unfinished_request_lives_through_a_sync_as_declared(
        self,
        start: Callable[[], Replica],
        reference: torch.nn.Module,
        new_reference: torch.nn.Module,
        new_model: Path,
    ) -> None:
        """Tokens sampled before the sync have the old version; tokens after it have the new one.

        With ``kv_after_sync`` ``recomputed``, the new weights continue from the old tokens; with ``dropped``, the
        request ends with the reason ``abort``; with ``kept``, later tokens also depend on the cache of the old weights.
        """
        if not self.record().streaming or "tensors" not in self.record().channels:
            not_applicable("the record does not declare 'streaming' and the channel 'tensors'")
        policy = kv_after_sync_of(self.record(), self.make_options(dtype="float32"))
        replica, new = start(), read_checkpoint(new_model)

        async def interrupt() -> Completion:
            begun = asyncio.Event()
            task = asyncio.ensure_future(
                replica.generator.generate(ask("kept", max_tokens=LONG), lambda start, tokens: begun.set())
            )
            await begun.wait()
            await replica.generator.pause()
            loader = replica.generator.loader
            await loader.begin(1, manifest_of(new, loader.expected_manifest().aliases))
            await loader.load_tensors(new.items())
            await loader.finish()
            await replica.generator.resume()
            return await task

        completion = replica.run(interrupt())
        old, *later = completion.version_spans
        tokens = completion.token_ids.tolist()
        assert (old.start, old.version) == (0, 0), completion.version_spans
        assert tokens[: old.stop] == plain_greedy(reference, PROMPTS[0], old.stop)
        if policy == "dropped":
            assert (completion.finish_reason, later) == ("abort", []), completion
            return
        [fresh] = later
        assert (fresh.start, fresh.version, fresh.stop) == (old.stop, 1, LONG), completion.version_spans
        if policy == "kept":
            recomputed = plain_logprobs(new_reference, PROMPTS[0], completion, completion.basis)[old.stop :]
            apart = float((torch.from_numpy(completion.logprobs[old.stop :]).double() - recomputed).abs().max())
            assert apart > ABSOLUTE, (
                "declares kv_after_sync='kept', but the later tokens are of a cache of the new weights"
            )
        if policy == "recomputed":
            context = [*PROMPTS[0], *tokens[: old.stop]]
            assert tokens[old.stop :] == plain_greedy(new_reference, context, LONG - old.stop)

    def test_a_manifest_that_does_not_fit_is_refused(
        self, synced: Replica, tensors: Mapping[str, Tensor], reference: torch.nn.Module
    ) -> None:
        """``begin`` refuses a wrong manifest with an error that names the tensor, and the replica keeps serving.

        Engines ignore unknown names and crash on wrong shapes, so the adapter must check before it loads anything.
        """
        synced.sync(tensors, synced.generator.policy_version + 1)
        version = synced.generator.policy_version
        loader = synced.generator.loader
        good = manifest_of(tensors, loader.expected_manifest().aliases)
        name = sorted(tensors)[0]
        spec = good.tensors[name]
        rest = {key: value for key, value in good.tensors.items() if key != name}
        bad = {
            "no.such.weight": dict(good.tensors) | {"no.such.weight": TensorSpec("no.such.weight", (2,), "float32")},
            name: rest,
            f"{name}: shape": rest | {name: TensorSpec(name, (*spec.shape[:-1], spec.shape[-1] + 1), spec.dtype)},
        }
        for what, manifest in bad.items():
            with pytest.raises(WeightSyncError) as caught:
                synced.run(loader.begin(version + 1, WeightManifest(manifest, good.aliases)))
            assert what.split(":")[0] in str(caught.value), f"does not name {what}: {caught.value}"
            assert synced.generator.state == "serving", f"a refused manifest ({what}) stopped the replica"
        self._assert_serves(synced, reference, version)

    @pytest.mark.parametrize(
        "fault", ["unknown name", "wrong shape", "wrong dtype", "missing tensor", "one name for another", "twice"]
    )
    def test_weights_that_were_not_announced_are_refused(
        self, start: Callable[[], Replica], tensors: Mapping[str, Tensor], fault: str
    ) -> None:
        """Tensors that differ from the announced manifest raise, and the replica becomes ``dead``: it never serves
        partly loaded weights.
        """
        if "tensors" not in self.record().channels:
            not_applicable("the record does not declare the channel 'tensors'")
        replica = start()
        names = sorted(tensors)
        sent = dict(tensors)
        if fault == "unknown name":
            sent["no.such.weight"] = torch.zeros(2)
        elif fault == "wrong shape":
            sent[names[0]] = torch.zeros(*tensors[names[0]].shape, 2)
        elif fault == "wrong dtype":
            sent[names[0]] = tensors[names[0]].double()
        elif fault == "missing tensor":
            del sent[names[-1]]
        elif fault == "one name for another":
            sent[f"{names[0]}.renamed"] = sent.pop(names[0])
        given = [*sent.items(), *([(names[0], tensors[names[0]])] if fault == "twice" else [])]
        loader = ReusedMemoryLoader(replica.generator.loader)

        async def load() -> None:
            await loader.begin(1, manifest_of(tensors, loader.expected_manifest().aliases))
            await loader.load_tensors(given)
            await loader.finish()

        with pytest.raises(WeightSyncError):
            replica.run(load())
        assert replica.generator.state == "dead", f"{fault}: the replica is {replica.generator.state}, not dead"
        with pytest.raises(BackendError) as caught:
            replica.ask(ask("after-the-fault"))
        assert "after-the-fault" in str(caught.value)

    @pytest.mark.parametrize("fault", ["missing tail", "shifted box", "twice"])
    def test_boxes_that_do_not_cover_a_tensor_once_are_refused(
        self, start: Callable[[], Replica], tensors: Mapping[str, Tensor], fault: str
    ) -> None:
        """Channel ``boxes``: an element that is missing, duplicate or outside the tensor makes the replica ``dead``."""
        if "boxes" not in self.record().channels:
            not_applicable("the record does not declare the channel 'boxes'")
        replica = start()
        loader, last = replica.generator.loader, sorted(tensors)[-1]
        shards = [shard for name in sorted(tensors) for shard in _halves(name, tensors[name])]
        at = max(index for index, shard in enumerate(shards) if shard.name == last)
        (first, stop), *rest = shards[at].box
        if fault == "missing tail":
            shards[at] = replace(shards[at], box=((first, stop - 1), *rest), tensor=shards[at].tensor[:-1])
        elif fault == "shifted box":
            shards[at] = replace(shards[at], box=((first + 1, stop + 1), *rest))
        else:
            shards.append(shards[at])

        async def load() -> None:
            await loader.begin(1, manifest_of(tensors, loader.expected_manifest().aliases))
            await loader.load_boxes(shards)
            await loader.finish()

        with pytest.raises(WeightSyncError) as caught:
            replica.run(load())
        assert last in str(caught.value), f"does not name {last}: {caught.value}"
        assert replica.generator.state == "dead", f"{fault}: the replica is {replica.generator.state}, not dead"

    def test_a_loading_replica_serves_nothing(
        self, start: Callable[[], Replica], tensors: Mapping[str, Tensor]
    ) -> None:
        """Between ``begin`` and ``finish`` the state is ``loading``; after ``fail`` it is ``dead``, and ``health``
        gives the reason.
        """
        replica = start()
        loader = replica.generator.loader
        replica.run(loader.begin(1, manifest_of(tensors, loader.expected_manifest().aliases)))
        assert replica.generator.state == "loading"
        with pytest.raises(BackendError):
            replica.ask(ask("while-loading"))
        replica.run(loader.fail("the sender went away"))
        state: ReplicaState = replica.generator.state
        assert state == "dead"
        assert "the sender went away" in str(replica.generator.health())

    def _assert_serves(self, replica: Replica, reference: torch.nn.Module, version: int) -> None:
        """Check that greedy output and scores match ``reference`` and that versions equal ``version``."""
        assert (replica.generator.policy_version, replica.generator.state) == (version, "serving")
        requests = [ask(f"check-{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        for request, completion in zip(requests, replica.ask(*requests), strict=True):
            expected = plain_greedy(reference, request.prompt_ids.tolist())
            assert completion.token_ids.tolist() == expected, f"{request.id}: differs from a plain forward"
            assert_completion(reference, request, completion, version)
        if self.record().scores:
            request = ask_score("check-score", PROMPTS[1], PROMPTS[3])
            assert_completion(reference, request, replica.ask(request)[0], version)


def _halves(name: str, tensor: Tensor) -> list[WeightShard]:
    """Split a tensor into two boxes along its first dimension."""
    shape, middle = tuple(tensor.shape), tensor.shape[0] // 2
    rest = tuple((0, size) for size in shape[1:])
    cuts = [(0, middle), (middle, shape[0])]
    return [
        WeightShard(name, shape, ((start, stop), *rest), rank, tensor[start:stop])
        for rank, (start, stop) in enumerate(cuts)
        if stop > start
    ]
