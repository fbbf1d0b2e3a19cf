"""The contract of a trainer's checkpoints: several updates, random state, used directories, other models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.types import TrainBatch
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.batches import MaskedPolicyLoss
from chatlearn_testing.model_directory import copy_with_weights, read_checkpoint
from chatlearn_testing.stress import MORE, stress_round
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.trainer_fixtures import MakeTrainer, TrainerFixtures, stream

NUM_UPDATES = 3
"""Updates before and after a checkpoint, so that a schedule or count that acts later than the first is noticed."""


class TrainerCheckpointsContract(TrainerFixtures, ConformanceSuite):
    """The part of ``TrainerConformance`` about what ``save`` writes and ``load`` accepts."""

    def test_several_updates_are_resumed(self, make_trainer: MakeTrainer, batch: TrainBatch, tmp_path: Path) -> None:
        """Three updates after a checkpoint of three updates have the same ``lr``, loss and weights in the trainer that
        loaded it, also under a schedule, if the options have ``warmup_steps``.

        Another ``lr``: the schedule or its count of updates was not saved.
        """
        loss = MaskedPolicyLoss()
        fields = self.options_model().model_fields
        for case, options in {"constant": {}, "warm-up": {"warmup_steps": 8}}.items():
            if not options.keys() <= fields.keys():
                continue
            trainer, resumed = make_trainer(**options), make_trainer(**options)
            prepared = loss.prepare(batch)
            for _ in range(NUM_UPDATES * (MORE if stress_round() else 1)):
                trainer.update(prepared, loss)
            trainer.save(tmp_path / case)
            resumed.load(tmp_path / case)
            for number in range(NUM_UPDATES * (MORE if stress_round() else 1)):
                expected, found = trainer.update(prepared, loss), resumed.update(prepared, loss)
                for name in ("lr", "loss", "grad_norm"):
                    assert found[name] == expected[name], (
                        f"{case}, update {number + 1} after the checkpoint: {name} is {found[name].value} instead of"
                        f" {expected[name].value}"
                    )
            weights = stream(resumed)
            different = [name for name, tensor in stream(trainer).items() if not torch.equal(tensor, weights[name])]
            assert not different, f"{case}: after the updates, these differ: {', '.join(different)}"

    def test_random_state_is_resumed(self, make_trainer: MakeTrainer, tmp_path: Path) -> None:
        """``load`` gives torch's global generator the state that it had at ``save``: dropout and router noise after a
        resume are those of the run that was interrupted.
        """
        trainer, state = make_trainer(), torch.get_rng_state()
        try:
            torch.manual_seed(1234)
            torch.rand(3)
            trainer.save(tmp_path / "checkpoint")
            expected = torch.rand(4)
            torch.manual_seed(99)
            resumed = make_trainer()
            resumed.load(tmp_path / "checkpoint")
            found = torch.rand(4)
        finally:
            torch.set_rng_state(state)
        assert torch.equal(found, expected), "torch draws other numbers after load than after save"

    def test_a_used_directory_holds_the_last_checkpoint(
        self, make_trainer: MakeTrainer, batch: TrainBatch, tmp_path: Path
    ) -> None:
        """``save`` into a directory with an older checkpoint replaces it, as a run does after a save that failed.

        The older weights: ``save`` does not overwrite, or files of both checkpoints are mixed.
        """
        trainer, loss = make_trainer(), MaskedPolicyLoss()
        for _ in range(2):
            trainer.update(loss.prepare(batch), loss)
            trainer.save(tmp_path / "used")
        trainer.save(tmp_path / "new")
        used, new = make_trainer(), make_trainer()
        used.load(tmp_path / "used")
        new.load(tmp_path / "new")
        for step in ("after loading", "after the next step"):
            weights = stream(used)
            different = [name for name, tensor in stream(new).items() if not torch.equal(tensor, weights[name])]
            assert not different, f"{step}, a used directory differs from a new one in {', '.join(different)}"
            for each in (used, new):
                each.update(loss.prepare(batch), loss)

    def test_a_checkpoint_of_another_model_is_refused(
        self, make_trainer: MakeTrainer, model_directory: Path, tmp_path: Path
    ) -> None:
        """The checkpoint of a model with a larger vocabulary raises a ``CheckpointError`` that names it, in the
        trainer of the suite's model; it is not taken as far as it fits.
        """
        larger = larger_vocabulary(model_directory, tmp_path / "model")
        make_trainer(path=larger).save(tmp_path / "of-another")
        with pytest.raises(CheckpointError) as caught:
            make_trainer().load(tmp_path / "of-another")
        assert "of-another" in str(caught.value), f"does not name the checkpoint: {caught.value}"


def larger_vocabulary(directory: Path, target: Path) -> Path:
    """Copy a model directory, each token's weights twice, so that its tokenizer still fits; returns ``target``.

    The test that calls it is skipped if the configuration has no ``vocab_size``.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    size = config.get("vocab_size")
    if not isinstance(size, int):
        not_applicable("the suite's model has no vocab_size in its config.json")
    tensors = {
        name: tensor.repeat(*(2 if length == size else 1 for length in tensor.shape)) if tensor.dim() else tensor
        for name, tensor in read_checkpoint(directory).items()
    }
    copy_with_weights(directory, tensors, target)
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": 2 * size}), encoding="utf-8")
    return target
