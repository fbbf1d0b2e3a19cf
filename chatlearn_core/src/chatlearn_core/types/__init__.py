"""Data that crosses the borders between backends, algorithms and executor: plain slots dataclasses."""

from chatlearn_core.types.batch import TrainBatch, cumulative_lengths, pack_samples
from chatlearn_core.types.completion import (
    RAW_BASIS,
    Completion,
    FinishReason,
    Floats,
    GenerateRequest,
    LogprobBasis,
    SamplingParams,
    VersionSpan,
)
from chatlearn_core.types.metric import Metric, Metrics, Reducer, merge_metrics
from chatlearn_core.types.outputs import OutputName, OutputRequest, Outputs
from chatlearn_core.types.prompt import Demonstration, Example, Prompt, TokenIds
from chatlearn_core.types.sample import RewardResult, Sample, sample_from_completion
from chatlearn_core.types.weights import (
    Box,
    Endpoint,
    FleetRule,
    Payload,
    ReplicaState,
    SyncOffer,
    SyncPlan,
    SyncReceipt,
    TensorSpec,
    WeightManifest,
    WeightShard,
)

__all__ = [
    "RAW_BASIS",
    "Box",
    "Completion",
    "Demonstration",
    "Endpoint",
    "Example",
    "FinishReason",
    "FleetRule",
    "Floats",
    "GenerateRequest",
    "LogprobBasis",
    "Metric",
    "Metrics",
    "OutputName",
    "OutputRequest",
    "Outputs",
    "Payload",
    "Prompt",
    "Reducer",
    "ReplicaState",
    "RewardResult",
    "Sample",
    "SamplingParams",
    "SyncOffer",
    "SyncPlan",
    "SyncReceipt",
    "TensorSpec",
    "TokenIds",
    "TrainBatch",
    "VersionSpan",
    "WeightManifest",
    "WeightShard",
    "cumulative_lengths",
    "merge_metrics",
    "pack_samples",
    "sample_from_completion",
]
