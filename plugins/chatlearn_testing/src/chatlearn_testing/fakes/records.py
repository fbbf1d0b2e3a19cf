"""Records of the fakes, as a plugin would register them. Does not import torch."""

from __future__ import annotations

from dataclasses import replace

from chatlearn_core.plugins.records import (
    AlgorithmSpec,
    DatasetSpec,
    GeneratorSpec,
    ModelFamilySpec,
    RewardSpec,
    ScheduleSpec,
    TrainerSpec,
    WeightSyncSpec,
)

_FAKES = "chatlearn_testing.fakes"

FAKE_TRAINER = TrainerSpec(
    name="fake",
    summary="A bigram model with exact gradients; rows sharded over ranks.",
    factory=f"{_FAKES}.trainer:FakeTrainer",
    options=f"{_FAKES}.options:FakeTrainerOptions",
    outputs=frozenset({"logprobs", "entropy"}),
    exports=frozenset({"full_tensors", "boxes"}),
    channels=frozenset({"tensors", "boxes"}),
)

FAKE_PIPELINE_TRAINER = TrainerSpec(
    name="fake_pipeline",
    summary="A Llama over pipeline stages of several shards: loss on the last, boxes of every rank.",
    factory=f"{_FAKES}.pipeline_trainer:FakePipelineTrainer",
    options=f"{_FAKES}.options:FakePipelineOptions",
    outputs=frozenset({"logprobs"}),
    exports=frozenset({"boxes"}),
    parallel={"pp": "stages"},
    devices=frozenset({"cpu"}),
)

FAKE_GENERATOR = GeneratorSpec(
    name="fake",
    summary="Samples from a bigram model on the event loop.",
    factory=f"{_FAKES}.generator:FakeGenerator",
    options=f"{_FAKES}.options:FakeGeneratorOptions",
    channels=frozenset({"tensors", "boxes", "checkpoint"}),
    kv_after_sync="recomputed",
    streaming=True,
    resumable=True,
    scores=True,
    seeded=True,
    model_families=frozenset({"bigram"}),
)

FAKE_MEDIA_GENERATOR = replace(
    FAKE_GENERATOR,
    name="fake_media",
    summary="A bigram generator that expands media in prompts and reports the experts of every token.",
    factory=f"{_FAKES}.media_generator:MediaGenerator",
)

FAKE_MEDIA_FORMAT = DatasetSpec(
    name="fake_media",
    summary="Text with placeholders for the entries of the column media.",
    factory=f"{_FAKES}.media_format:MediaFormat",
    options=f"{_FAKES}.options:FakeOptions",
)

BIGRAM_FAMILY = ModelFamilySpec(
    name="bigram",
    summary="Bigram models: one letter per token.",
    factory=f"{_FAKES}.family:BigramFamily",
    options=f"{_FAKES}.options:FakeOptions",
    model_types=frozenset({"bigram"}),
)

REMOTE_FAKE_GENERATOR = GeneratorSpec(
    name="fake_remote",
    summary="FakeGenerator in a separate process, called over its standard streams.",
    factory=f"{_FAKES}.remote_generator:RemoteFakeGenerator",
    options=f"{_FAKES}.options:FakeRemoteOptions",
    channels=frozenset({"tensors", "boxes", "checkpoint"}),
    kv_after_sync="recomputed",
    streaming=True,
    resumable=True,
    scores=True,
    seeded=True,
    own_interpreter=True,
    model_families=frozenset({"bigram"}),
)

FAKE_REWARD = RewardSpec(
    name="fake",
    summary="The fraction of the completion's tokens that equal one token.",
    factory=f"{_FAKES}.reward:FakeReward",
    options=f"{_FAKES}.options:FakeRewardOptions",
)

FAKE_WEIGHT_SYNC = WeightSyncSpec(
    name="fake",
    summary="Whole tensors through a queue in one process.",
    sender=f"{_FAKES}.queue_sync:FakeSender",
    receiver=f"{_FAKES}.queue_sync:FakeReceiver",
    options=f"{_FAKES}.options:FakeOptions",
    reach="process",
)

FAKE_BOX_SYNC = WeightSyncSpec(
    name="fake_boxes",
    summary="Boxes of every rank through files, assembled by the receiver.",
    sender=f"{_FAKES}.box_sync:FakeBoxSender",
    receiver=f"{_FAKES}.box_sync:FakeBoxReceiver",
    options=f"{_FAKES}.options:FakeOptions",
    exports=("boxes",),
    channels=("tensors",),
    reach="anywhere",
)

FAKE_ALGORITHM = AlgorithmSpec(
    name="fake",
    summary="A policy gradient with the mean reward of the group as baseline.",
    factory=f"{_FAKES}.algorithm:FakeAlgorithm",
    options=f"{_FAKES}.options:FakeAlgorithmOptions",
    roles=(("trainer", "trainer"), ("generator", "generator"), ("reward", "reward")),
)

FAKE_SCHEDULE = ScheduleSpec(
    name="fake",
    summary="A value that rises by the same amount in each step.",
    factory=f"{_FAKES}.schedule:FakeSchedule",
    options=f"{_FAKES}.options:FakeScheduleOptions",
)
