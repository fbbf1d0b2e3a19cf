"""Builds trainers for the trainer suite and reads their outputs and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from torch import Tensor

from chatlearn_core.protocols import Head, ModelSource, RoleContext, Trainer
from chatlearn_core.types import OutputRequest, TrainBatch, WeightManifest
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.model_suite import ModelSuite

RELATIVE = 1e-4
"""Maximum relative error of losses and gradient norms, float32 (invariant 5 of the design)."""
ABSOLUTE = 1e-4
"""Maximum absolute error of logprobs and entropies, nats, float32 (invariant 3)."""
LEARNING_RATE = 1e-3
"""Changes float32 weights far more than rounding does, and lowers the loss of random models."""
SMALL_BUDGET = 24
"""Size of a micro-batch that holds one or two of the suite's sequences, tokens."""

MakeTrainer = Callable[..., Trainer]
"""``make_trainer(*, head="lm", trainable=True, path=None, **options)`` builds a trainer and sets it up; the fixture
closes it after the test.
"""


class TrainerFixtures(ModelSuite, ConformanceSuite):
    """The fixture ``make_trainer`` and the attributes that configure it."""

    settable: ClassVar[frozenset[str]] = frozenset({"micro_batch_options", "rank_layouts"})
    micro_batch_options: ClassVar[Mapping[str, Any] | None] = None
    """Options under which a micro-batch holds few tokens; None: ``max_tokens_per_micro_batch``."""

    rank_layouts: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    """Options of two ranks, beside the suite's, in each layout that is tried."""

    @pytest.fixture
    def make_trainer(self, model_directory: Path) -> Iterator[MakeTrainer]:
        """See ``MakeTrainer``."""
        made: list[Trainer] = []

        def make(*, head: Head = "lm", trainable: bool = True, path: Path | None = None, **options: Any) -> Trainer:
            directory = str(path or model_directory)
            context = RoleContext(
                "trainer", ModelSource(directory, directory, head), device=self.device, trainable=trainable
            )
            preferred = {"learning_rate": LEARNING_RATE, "param_dtype": "float32"} | options
            trainer = cast("Trainer", self.build()(self.make_options(**preferred), context))
            trainer.setup()
            made.append(trainer)
            return trainer

        yield make
        for trainer in made:
            trainer.close()

    @classmethod
    def small_micro_batches(cls) -> dict[str, Any]:
        """Return options that divide the suite's batch into several micro-batches."""
        if cls.micro_batch_options is not None:
            return dict(cls.micro_batch_options)
        assert "max_tokens_per_micro_batch" in cls.options_model().model_fields, (
            f"the options of {cls.record().name!r} have no max_tokens_per_micro_batch; set micro_batch_options to"
            " options that make micro-batches small, or to {} if this trainer never splits a batch"
        )
        return {"max_tokens_per_micro_batch": SMALL_BUDGET}


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    """Check that tensors are equal within ``ABSOLUTE`` and ``RELATIVE``; a failure names the entry with most error."""
    assert found.shape == expected.shape, f"{what}: shape {list(found.shape)}, expected {list(expected.shape)}"
    apart = (found.double() - expected.double()).abs()
    worst = int(apart.flatten().argmax()) if apart.numel() else 0
    assert not apart.numel() or float(apart.max()) <= ABSOLUTE + RELATIVE * float(expected.abs().max()), (
        f"{what}: {float(found.flatten()[worst])} at entry {worst}, expected {float(expected.flatten()[worst])}"
    )


def stream(trainer: Trainer) -> dict[str, Tensor]:
    """Copy every tensor that the trainer streams to the host, by name."""
    return {shard.name: shard.tensor.detach().cpu().clone() for shard in trainer.weights()}


def whole_manifest(trainer: Trainer) -> WeightManifest:
    """Return the manifest that rank 0 announces for all ranks."""
    manifest = trainer.manifest()
    assert manifest is not None, "rank 0 must return the manifest of all ranks; only other ranks may return None"
    return manifest


def logprobs_of(trainer: Trainer, batch: TrainBatch) -> Tensor:
    """Return the trainer's [T] logprobs of a batch."""
    return trainer.compute(batch, OutputRequest(frozenset({"logprobs"})))["logprobs"]
