"""The schema against a real validator: what the loader accepts passes, what it refuses is marked."""

import copy
import json
import sys
import types
from typing import Literal

import pytest
import yaml
from pydantic import BaseModel, Field

from chatlearn_cli.config_schema import config_schema
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.records import (
    AlgorithmSpec,
    DatasetSpec,
    GeneratorSpec,
    LoggerSpec,
    PluginRecord,
    RewardSpec,
    RuntimeSpec,
    TrainerSpec,
    WeightSyncSpec,
)
from chatlearn_core.plugins.registry import PluginRegistry

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

OPTIONS_MODULE = "acme_options_of_schema_tests"
VALID = """\
model: {path: models/tiny}
data:
  train: [{path: data/train.jsonl}]
algorithm: {name: grpo}
roles:
  trainer: {kind: trainer, backend: fsdp}
  generator: {kind: generator, backend: transformers}
  reward: {kind: reward, backend: math}
train: {steps: 10, prompts_per_step: 4}
"""


class Empty(BaseModel, extra="forbid"):
    pass


class Schedule(BaseModel, extra="forbid"):
    kind: Literal["constant", "cosine"] = "constant"


class TrainerOptions(BaseModel, extra="forbid"):
    lr: float = 1e-3
    max_tokens_per_micro_batch: int = Field(4096, ge=1, description="Token budget.")
    schedule: Schedule = Schedule()
    betas: tuple[float, float] = (0.9, 0.95)


class GroupOptions(BaseModel, extra="forbid"):
    group_size: int = 4


class Depth(BaseModel):
    depth: int = 1


def code(options: str) -> dict[str, str]:
    return {"factory": "acme.code:Thing", "options": f"{OPTIONS_MODULE}:{options}"}


RECORDS: list[PluginRecord] = [
    TrainerSpec(name="fsdp", **code("TrainerOptions")),
    TrainerSpec(name="missing_options", **code("Nothing")),
    GeneratorSpec(name="transformers", seeded=True, **code("Empty")),
    RewardSpec(name="math", **code("Empty")),
    RewardSpec(name="format", **code("Depth")),
    AlgorithmSpec(name="grpo", **code("GroupOptions")),
    WeightSyncSpec(name="direct", sender="acme.sync:S", receiver="acme.sync:R", options=f"{OPTIONS_MODULE}:Empty"),
    RuntimeSpec(name="local", **code("Empty")),
    LoggerSpec(name="console", **code("Depth")),
    DatasetSpec(name="gsm8k", **code("Empty")),
]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> PluginRegistry:
    module = types.ModuleType(OPTIONS_MODULE)
    for model in (Empty, TrainerOptions, GroupOptions, Depth):
        setattr(module, model.__name__, model)
    monkeypatch.setitem(sys.modules, OPTIONS_MODULE, module)
    return PluginRegistry(
        tuple(
            PluginEntry(name=r.name, kind=r.kind, distribution="acme", version="0.3.0", status="ok", record=r)
            for r in RECORDS
        )
    )


@pytest.fixture
def validator(registry: PluginRegistry):
    described, _ = config_schema(registry)
    jsonschema.Draft202012Validator.check_schema(described)
    return jsonschema.Draft202012Validator(json.loads(json.dumps(described)))


def changed(*path: str | int, value: object) -> dict:
    values = copy.deepcopy(yaml.safe_load(VALID))
    section = values
    for part in path[:-1]:
        section = section.setdefault(part, {}) if isinstance(section, dict) else section[part]
    section[path[-1]] = value
    return values


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("name",), "x"),
        (("train", "steps"), "${oc.decode:${oc.env:STEPS}}"),
        (("eval", "sampling"), "${sampling}"),
        (("roles", "trainer", "options"), {"lr": "${x.y}", "betas": [0.1, 0.2], "schedule": {"kind": "cosine"}}),
        (("algorithm", "options"), {"group_size": 8}),
        (("weight_sync", "backend"), "auto"),
        (("data", "train", 0, "format"), "gsm8k"),
        (("roles", "reward", "parts"), [{"backend": "format", "options": {"depth": 2}}]),
        (("log", "loggers"), [{"name": "console", "options": {"depth": 2}}]),
    ],
)
def test_valid(path: tuple, value: object, validator) -> None:
    assert list(validator.iter_errors(changed(*path, value=value))) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("nmae",), "x"),
        (("train", "steps"), "ten"),
        (("train", "steps"), 0),
        (("roles", "trainer", "backend"), "transformers"),  # a generator
        (("roles", "trainer", "options"), {"lrr": 1}),
        (("roles", "trainer", "options"), {"schedule": {"kind": "cosin"}}),
        (("roles", "generator", "options"), {"lr": 1}),  # an option of another backend
        (("algorithm", "options"), {"group_size": "many"}),
        (("algorithm", "name"), "console"),  # a logger
        (("weight_sync", "backend"), "nfs"),
        (("runtime", "options"), {"x": 1}),  # options of the default backend
        (("roles", "reward", "parts"), [{"backend": "math", "options": {"depth": 2}}]),
    ],
)
def test_invalid(path: tuple, value: object, validator) -> None:
    assert list(validator.iter_errors(changed(*path, value=value)))


def test_descriptions_reach_the_editor(registry: PluginRegistry) -> None:
    described, _ = config_schema(registry)
    assert (
        described["$defs"]["trainer.fsdp"]["properties"]["max_tokens_per_micro_batch"]["description"] == "Token budget."
    )
    assert described["$defs"]["TrainConfig"]["properties"]["prompts_per_step"]["description"]


def test_a_plugin_without_options_model_is_left_out_and_told(registry: PluginRegistry) -> None:
    described, failures = config_schema(registry)
    assert len(failures) == 1
    assert "The trainer backend 'missing_options' (acme 0.3.0) cannot be imported" in failures[0]
    assert "trainer.missing_options" not in described["$defs"]
