"""Registers fakes, which tests install as a separate distribution so that worker processes find them."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import (
    DatasetSpec,
    GeneratorSpec,
    ModelFamilySpec,
    RewardSpec,
    TrainerSpec,
    WeightSyncSpec,
)
from chatlearn_testing.fakes.records import (
    BIGRAM_FAMILY,
    FAKE_BOX_SYNC,
    FAKE_GENERATOR,
    FAKE_MEDIA_FORMAT,
    FAKE_MEDIA_GENERATOR,
    FAKE_PIPELINE_TRAINER,
    FAKE_REWARD,
    FAKE_TRAINER,
)


@hookimpl
def chatlearn_trainers() -> Iterable[TrainerSpec]:
    """Register the bigram trainer and the trainer with pipeline stages."""
    return [FAKE_TRAINER, FAKE_PIPELINE_TRAINER]


@hookimpl
def chatlearn_generators() -> Iterable[GeneratorSpec]:
    """Register the bigram generator and the generator that expands media."""
    return [FAKE_GENERATOR, FAKE_MEDIA_GENERATOR]


@hookimpl
def chatlearn_model_families() -> Iterable[ModelFamilySpec]:
    """Register the family of bigram models."""
    return [BIGRAM_FAMILY]


@hookimpl
def chatlearn_datasets() -> Iterable[DatasetSpec]:
    """Register the format of prompts with media."""
    return [FAKE_MEDIA_FORMAT]


@hookimpl
def chatlearn_rewards() -> Iterable[RewardSpec]:
    """Register the reward that is the fraction of one token in a completion."""
    return [FAKE_REWARD]


@hookimpl
def chatlearn_weight_syncs() -> Iterable[WeightSyncSpec]:
    """Register the transport between processes."""
    return [FAKE_BOX_SYNC]
