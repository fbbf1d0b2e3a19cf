"""A registry of small plugins whose options models live in a module made for the test."""

import sys
import types
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator

from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.records import (
    AlgorithmSpec,
    DatasetSpec,
    EnvironmentSpec,
    GeneratorSpec,
    LoggerSpec,
    PluginRecord,
    RewardSpec,
    RoleUse,
    RuntimeSpec,
    TrainerSpec,
    WeightSyncSpec,
)
from chatlearn_core.plugins.registry import PluginRegistry

OPTIONS_MODULE = "acme_options_of_config_tests"


class Forbidding(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Empty(Forbidding):
    pass


class Schedule(Forbidding):
    kind: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)


class TrainerOptions(Forbidding):
    lr: float = 1e-3
    max_tokens_per_micro_batch: int = Field(4096, ge=1, description="Token budget.")
    schedule: Schedule = Schedule()
    betas: tuple[float, float] = (0.9, 0.95)


class GroupOptions(Forbidding):
    group_size: int = 4
    supervision: str = "outcome"

    @property
    def needs_steps(self) -> str | None:
        return "reward" if self.supervision == "process" else None

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        return (("group_size", "so many are rarely worth it"),) if self.group_size > 1000 else ()


class Careless(BaseModel):
    """Ignores unknown keys, as pydantic does by default."""

    depth: int = 1


class Raising(Forbidding):
    level: int = 0

    @field_validator("level")
    @classmethod
    def explode(cls, value: int) -> int:
        raise RuntimeError("boom")


def engine_problems(arguments: dict[str, object]) -> dict[str, str]:
    """Of an engine that takes ``revision`` and ``a``."""
    unknown = [name for name in arguments if name not in ("revision", "a") and 1 / len(name)]
    return dict.fromkeys(unknown, "unknown; did you mean 'revision'?")


def no_problems(arguments: dict[str, object]) -> dict[str, str]:
    """Of an engine that takes anything."""
    return {}


def entry(record: PluginRecord) -> PluginEntry:
    return PluginEntry(
        name=record.name, kind=record.kind, distribution="acme", version="0.3.0", status="ok", record=record
    )


def code(options: str) -> dict[str, str]:
    return {"factory": "acme.code:Thing", "options": f"{OPTIONS_MODULE}:{options}"}


def transport(name: str, **fields: object) -> WeightSyncSpec:
    return WeightSyncSpec(
        name=name, sender="acme.sync:S", receiver="acme.sync:R", options=f"{OPTIONS_MODULE}:Empty", **fields
    )


def make_registry() -> PluginRegistry:
    records = [
        TrainerSpec(
            name="fsdp",
            heads=frozenset({"lm", "value"}),
            max_ranks=2,
            check_engine=f"{OPTIONS_MODULE}:no_problems",
            **code("TrainerOptions"),
        ),
        TrainerSpec(name="careless", **code("Careless")),
        TrainerSpec(name="raising", **code("Raising")),
        TrainerSpec(name="missing_options", **code("Nothing")),
        GeneratorSpec(
            seeded=True,
            name="transformers",
            channels=frozenset({"tensors"}),
            devices=frozenset({"cpu", "cuda", "xpu"}),
            check_engine=f"{OPTIONS_MODULE}:engine_problems",
            **code("Empty"),
        ),
        GeneratorSpec(
            seeded=True,
            name="adapters",
            channels=frozenset({"tensors"}),
            payloads=frozenset({"adapter"}),
            **code("Empty"),
        ),
        GeneratorSpec(
            name="raw", seeded=True, bases=frozenset({"raw"}), channels=frozenset({"tensors"}), **code("Empty")
        ),
        GeneratorSpec(
            name="engineless", seeded=True, requires=(("acme-engine>=9",),), own_interpreter=True, **code("Empty")
        ),
        EnvironmentSpec(name="game", **code("Empty")),
        EnvironmentSpec(name="agent", more_uses=True, **code("Empty")),
        RewardSpec(name="math", **code("Empty")),
        RewardSpec(name="judged", uses={"judge": RoleUse()}, **code("Empty")),
        RewardSpec(name="format", **code("Careless")),
        AlgorithmSpec(
            name="grpo",
            roles=(("trainer", "trainer"), ("generator", "generator"), ("reward", "reward")),
            **code("GroupOptions"),
        ),
        AlgorithmSpec(
            name="ratios",
            roles=(("trainer", "trainer"), ("generator", "generator"), ("reward", "reward")),
            compares_generator_logprobs=True,
            **code("GroupOptions"),
        ),
        AlgorithmSpec(name="sft", roles=(("trainer", "trainer"),), **code("Empty")),
        transport("direct"),
        transport("boxes", exports=("boxes",)),
        transport("disk", channels=("checkpoint",)),
        transport("collective", per_replica=False, speed_rank=200),
        RuntimeSpec(name="local", **code("Empty")),
        RuntimeSpec(name="cluster", placement="anywhere", **code("Empty")),
        LoggerSpec(name="console", **code("Careless")),
        DatasetSpec(name="gsm8k", **code("Empty")),
    ]
    return PluginRegistry(entries=tuple(entry(record) for record in records))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> PluginRegistry:
    module = types.ModuleType(OPTIONS_MODULE)
    for model in (Empty, TrainerOptions, GroupOptions, Careless, Raising):
        setattr(module, model.__name__, model)
    for function in (engine_problems, no_problems):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, OPTIONS_MODULE, module)
    return make_registry()


VALID = """\
model:
  path: models/tiny
data:
  train:
    - path: data/train.jsonl
algorithm:
  name: grpo
roles:
  trainer:
    kind: trainer
    backend: fsdp
  generator:
    kind: generator
    backend: transformers
  reward:
    kind: reward
    backend: math
train:
  steps: 10
  prompts_per_step: 4
"""


@pytest.fixture
def valid() -> str:
    return VALID
