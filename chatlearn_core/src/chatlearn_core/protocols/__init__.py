"""Typed protocols that backends implement, one file per kind."""

from chatlearn_core.protocols.aggregation import Aggregation, SelectAggregation
from chatlearn_core.protocols.algorithm import Algorithm, AlgorithmContext, RoleUpdate, Split
from chatlearn_core.protocols.data_store import DataStore, PlainData, ReadsSamples
from chatlearn_core.protocols.decisions import (
    Decision,
    ExampleSampler,
    SampleFilter,
    SamplerContext,
    Schedule,
    StepPolicy,
)
from chatlearn_core.protocols.environment import (
    Environment,
    GenerateFor,
    RolloutContext,
    RolloutOrder,
    SequenceBuilder,
)
from chatlearn_core.protocols.generator import (
    Generator,
    MemoryHandleLoader,
    OnTokens,
    ProcessGroupLoader,
    WeightLoader,
)
from chatlearn_core.protocols.launcher import Launcher, NodePart
from chatlearn_core.protocols.lifecycle import MEMORY_PARTS, Head, Lifecycle, MemoryPart, ModelSource, RoleContext
from chatlearn_core.protocols.logger import Logger
from chatlearn_core.protocols.loss import Loss, LossOutput, Unit
from chatlearn_core.protocols.memory import Device, MeasuresMemory, MemoryAction, MemoryEvent
from chatlearn_core.protocols.reward import Reward, RewardUnit
from chatlearn_core.protocols.role_handle import RoleHandle
from chatlearn_core.protocols.runtime import (
    AskGenerator,
    AtSync,
    BackgroundSavingGroup,
    Derive,
    EnvironmentGroup,
    GeneratorFleet,
    LendWeights,
    ModelGroup,
    RefreshingRuntime,
    RewardGroup,
    RoleGroup,
    RoleIsUp,
    Runtime,
    RuntimeEvent,
    TrainerGroup,
)
from chatlearn_core.protocols.tool import TOOL_NAME, Tool, ToolError, ToolSource
from chatlearn_core.protocols.trainer import BackgroundSavingTrainer, Trainer, WeightTakingTrainer
from chatlearn_core.protocols.weight_sync import WeightReceiver, WeightSender

__all__ = [
    "MEMORY_PARTS",
    "TOOL_NAME",
    "Aggregation",
    "Algorithm",
    "AlgorithmContext",
    "AskGenerator",
    "AtSync",
    "BackgroundSavingGroup",
    "BackgroundSavingTrainer",
    "DataStore",
    "Decision",
    "Derive",
    "Device",
    "Environment",
    "EnvironmentGroup",
    "ExampleSampler",
    "GenerateFor",
    "Generator",
    "GeneratorFleet",
    "Head",
    "Launcher",
    "LendWeights",
    "Lifecycle",
    "Logger",
    "Loss",
    "LossOutput",
    "MeasuresMemory",
    "MemoryAction",
    "MemoryEvent",
    "MemoryHandleLoader",
    "MemoryPart",
    "ModelGroup",
    "ModelSource",
    "NodePart",
    "OnTokens",
    "PlainData",
    "ProcessGroupLoader",
    "ReadsSamples",
    "RefreshingRuntime",
    "Reward",
    "RewardGroup",
    "RewardUnit",
    "RoleContext",
    "RoleGroup",
    "RoleHandle",
    "RoleIsUp",
    "RoleUpdate",
    "RolloutContext",
    "RolloutOrder",
    "Runtime",
    "RuntimeEvent",
    "SampleFilter",
    "SamplerContext",
    "Schedule",
    "SelectAggregation",
    "SequenceBuilder",
    "Split",
    "StepPolicy",
    "Tool",
    "ToolError",
    "ToolSource",
    "Trainer",
    "TrainerGroup",
    "Unit",
    "WeightLoader",
    "WeightReceiver",
    "WeightSender",
    "WeightTakingTrainer",
]
