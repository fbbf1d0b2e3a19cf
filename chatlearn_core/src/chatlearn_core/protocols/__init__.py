"""What a backend must be able to do: typed protocols, one file a kind."""

from chatlearn_core.protocols.algorithm import Algorithm, AlgorithmContext, InputKind
from chatlearn_core.protocols.episode import Episode, Generate
from chatlearn_core.protocols.generator import (
    Generator,
    MemoryHandleLoader,
    OnTokens,
    PauseMode,
    ProcessGroupLoader,
    StreamingGenerator,
    WeightLoader,
)
from chatlearn_core.protocols.lifecycle import Head, Lifecycle, MemoryPart, ModelSource, RoleContext
from chatlearn_core.protocols.logger import Logger
from chatlearn_core.protocols.loss import Loss, LossOutput, Unit
from chatlearn_core.protocols.memory import Device, MeasuresMemory, MemoryAction, MemoryEvent
from chatlearn_core.protocols.reward import Reward, RewardUnit
from chatlearn_core.protocols.runtime import (
    GeneratorFleet,
    LendWeights,
    ModelGroup,
    RewardGroup,
    RoleGroup,
    RoleIsUp,
    Runtime,
    RuntimeEvent,
    TrainerGroup,
)
from chatlearn_core.protocols.trainer import Trainer
from chatlearn_core.protocols.weight_sync import WeightReceiver, WeightSender

__all__ = [
    "Algorithm",
    "AlgorithmContext",
    "Device",
    "Episode",
    "Generate",
    "Generator",
    "GeneratorFleet",
    "Head",
    "InputKind",
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
    "OnTokens",
    "PauseMode",
    "ProcessGroupLoader",
    "Reward",
    "RewardGroup",
    "RewardUnit",
    "RoleContext",
    "RoleGroup",
    "RoleIsUp",
    "Runtime",
    "RuntimeEvent",
    "StreamingGenerator",
    "Trainer",
    "TrainerGroup",
    "Unit",
    "WeightLoader",
    "WeightReceiver",
    "WeightSender",
]
