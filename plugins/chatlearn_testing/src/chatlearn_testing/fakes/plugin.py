"""Registers fakes that tests install as a distribution of their own, so that workers find them."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import GeneratorSpec, RewardSpec, TrainerSpec, WeightSyncSpec
from chatlearn_testing.fakes.records import (
    FAKE_BOX_SYNC,
    FAKE_GENERATOR,
    FAKE_PIPELINE_TRAINER,
    FAKE_REWARD,
    FAKE_TRAINER,
)


@hookimpl
def chatlearn_trainers() -> Iterable[TrainerSpec]:
    """The bigram trainer, and the one over pipeline stages."""
    return [FAKE_TRAINER, FAKE_PIPELINE_TRAINER]


@hookimpl
def chatlearn_generators() -> Iterable[GeneratorSpec]:
    """The bigram generator."""
    return [FAKE_GENERATOR]


@hookimpl
def chatlearn_rewards() -> Iterable[RewardSpec]:
    """The share of a token."""
    return [FAKE_REWARD]


@hookimpl
def chatlearn_weight_syncs() -> Iterable[WeightSyncSpec]:
    """The transport between processes."""
    return [FAKE_BOX_SYNC]
