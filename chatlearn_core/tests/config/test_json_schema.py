"""The schema against a real validator: what the loader accepts passes, what it refuses is marked."""

import copy
import json

import pytest
import yaml

from chatlearn_core.config.json_schema import config_schema
from chatlearn_core.plugins.registry import PluginRegistry

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")


@pytest.fixture
def validator(registry: PluginRegistry):
    described, _ = config_schema(registry)
    jsonschema.Draft202012Validator.check_schema(described)
    return jsonschema.Draft202012Validator(json.loads(json.dumps(described)))


def changed(text: str, *path: str | int, value: object) -> dict:
    values = copy.deepcopy(yaml.safe_load(text))
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
def test_valid(path: tuple, value: object, valid: str, validator) -> None:
    assert list(validator.iter_errors(changed(valid, *path, value=value))) == []


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
def test_invalid(path: tuple, value: object, valid: str, validator) -> None:
    assert list(validator.iter_errors(changed(valid, *path, value=value)))


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
