"""Tools that other distributions register are chosen by name, and wrong choices are found in the configuration."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from chatlearn_agents.options import ToolsOptions
from chatlearn_agents.tool_environment import ToolEnvironment
from chatlearn_core.config.choices import PLUGINS
from chatlearn_core.config.invalid import InvalidConfigError
from chatlearn_core.config.load import LoadedConfig, load_config
from chatlearn_core.config.show import resolved_values
from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import ToolSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.sources import PluginSource
from chatlearn_core.protocols import RoleContext, Tool

SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}


class LookupOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    language: str = Field(description="Of the words.", alias="lang")
    limits: tuple[int, ...] = (1, 2)


class KindOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: str = "mine"


class Lookup:
    """Says a word in a language."""

    def __init__(self, options: LookupOptions) -> None:
        self.options = options

    def open(self) -> Sequence[Tool]:
        async def run(arguments: Mapping[str, Any]) -> str:
            return f"{arguments['word']} in {self.options.language}"

        return [Tool("lookup", "Looks a word up.", SCHEMA, run)]

    def close(self) -> None:
        """Nothing to release."""


@pytest.fixture(scope="module")
def registry() -> Iterator[PluginRegistry]:
    """What is installed, and a distribution with three tools."""
    code = types.ModuleType("acme_lookup_code")
    vars(code).update(Lookup=Lookup, LookupOptions=LookupOptions, KindOptions=KindOptions)
    sys.modules["acme_lookup_code"] = code

    @hookimpl
    def chatlearn_tools() -> list[ToolSpec]:
        good = {"options": "acme_lookup_code:LookupOptions"}
        return [
            ToolSpec(name="acme_lookup", factory="acme_lookup_code:Lookup", **good),
            ToolSpec(name="acme_missing", factory="acme_lookup_code:Missing", **good),
            ToolSpec(name="acme_engine", factory="acme_lookup_code:Lookup", requires=(("acme-engine>=1",),), **good),
            ToolSpec(name="acme_kind", factory="acme_lookup_code:Lookup", options="acme_lookup_code:KindOptions"),
        ]

    plugin = types.ModuleType("acme_lookup_plugin")
    vars(plugin).update(chatlearn_tools=chatlearn_tools)
    yield discover_plugins(extra=[PluginSource("acme", "acme-tools", "1.2", lambda: plugin)])
    del sys.modules["acme_lookup_code"]


def load(registry: PluginRegistry, *tools: Any) -> LoadedConfig:
    run = {
        "model": {"path": "model"},
        "data": {"train": [{"path": "train.jsonl"}]},
        "algorithm": {"name": "grpo", "options": {"roles": {"environment": "helper"}}},
        "roles": {
            "trainer": {"kind": "trainer", "backend": "fsdp"},
            "generator": {"kind": "generator", "backend": "transformers"},
            "reward": {"kind": "reward", "backend": "math"},
            "helper": {
                "kind": "environment",
                "backend": "tools",
                "uses": {"policy": "generator"},
                "options": {"tools": list(tools)},
            },
        },
        "train": {"steps": 1, "prompts_per_step": 4},
    }
    return load_config(yaml.safe_dump(run), (), registry)


def options_of(loaded: LoadedConfig) -> Any:
    return loaded.choices["roles.helper"].options


def answers(options: ToolsOptions) -> list[str]:
    environment = ToolEnvironment(options, RoleContext("helper"))
    environment.setup()
    try:
        return [one.text for one in asyncio.run(environment._toolbox.answer([("lookup", '{"word": "sun"}')]))]
    finally:
        environment.close()


def test_a_registered_tool_is_chosen_by_name_and_answers(registry: PluginRegistry) -> None:
    loaded = load(registry, {"kind": "acme_lookup", "lang": "Latin"}, "calculator")
    options = options_of(loaded)
    assert [(choice.record.name, choice.origin) for choice in options.tools] == [
        ("acme_lookup", "acme-tools 1.2"),
        ("calculator", "chatlearn-agents 0.1.0"),
    ]
    assert answers(options) == ["sun in Latin"]


def test_resolved_options_are_the_same_ones(registry: PluginRegistry) -> None:
    loaded = load(registry, {"kind": "acme_lookup", "lang": "Latin", "limits": [3]}, "shop.prices:price")
    written = resolved_values(loaded)["roles"]["helper"]["options"]
    [lookup, function] = written["tools"]
    assert lookup == {"kind": "acme_lookup", "lang": "Latin", "limits": [3]}
    assert function["path"] == "shop.prices:price"
    again = ToolsOptions.model_validate_json(json.dumps(written), strict=True, context={PLUGINS: registry})
    assert again == options_of(loaded)


def test_options_that_are_sent_to_a_worker_are_the_same_ones(registry: PluginRegistry) -> None:
    options = options_of(load(registry, {"kind": "acme_lookup", "lang": "Latin"}))
    sent = options.model_dump()
    assert sent["tools"] == ({"kind": "acme_lookup", "language": "Latin", "limits": (1, 2)},)
    received = ToolsOptions.model_validate(sent, context={PLUGINS: registry})
    assert received == options
    assert answers(received) == ["sun in Latin"]


@pytest.mark.parametrize(
    ("tool", "lines"),
    [
        (
            {"kind": "acme_lokup", "lang": "Latin"},
            [
                "roles.helper.options.tools.1.kind: No tool named 'acme_lokup'. (got 'acme_lokup')",
                "acme_kind, acme_lookup, acme_missing (acme-tools 1.2); calculator, function,",
                "Did you mean 'acme_lookup'?",
            ],
        ),
        ("pythn", ["roles.helper.options.tools.1: No tool named 'pythn'.", "Did you mean 'python'?"]),
        ({"kind": "acme_lookup"}, ["roles.helper.options.tools.1.lang: required key is missing"]),
        (
            {"kind": "acme_lookup", "lang": "Latin", "limit": 3},
            [
                "roles.helper.options.tools.1.limit: unknown key (got 3)",
                "did you mean 'limits'?",
                "valid keys: lang, limits",
            ],
        ),
        (
            {"kind": "acme_lookup", "lang": "Latin", "limits": [1, "2"]},
            ["roles.helper.options.tools.1.limits.1: must be a valid integer (got '2')"],
        ),
        ({"lang": "Latin"}, ["roles.helper.options.tools.1.kind: required key is missing"]),
        ({"kind": 3}, ["roles.helper.options.tools.1.kind: must be a valid string (got 3)"]),
        (3, ["roles.helper.options.tools.1: must be a text, or a mapping with a kind (got 3)"]),
        ({"kind": "acme_engine", "lang": "Latin"}, ["acme_engine (acme-tools 1.2) cannot run here", "acme-engine>=1"]),
        ({"kind": "acme_kind"}, ["the tool 'acme_kind' (acme-tools 1.2) has an option named kind"]),
    ],
)
def test_wrong_choices_are_found_in_the_configuration(tool: Any, lines: list[str], registry: PluginRegistry) -> None:
    with pytest.raises(InvalidConfigError) as raised:
        load(registry, "calculator", tool)
    for line in lines:
        assert line in str(raised.value)


def test_code_that_cannot_be_imported_names_its_distribution(registry: PluginRegistry) -> None:
    options = ToolsOptions.model_validate(
        {"tools": [{"kind": "acme_missing", "lang": "Latin"}]}, context={PLUGINS: registry}
    )
    with pytest.raises(PluginError, match=r"The tool 'acme_missing' \(acme-tools 1.2\) cannot be imported"):
        ToolEnvironment(options, RoleContext("helper"))


def test_validation_imports_no_code_of_a_tool(registry: PluginRegistry) -> None:
    load(registry, {"kind": "acme_missing", "lang": "Latin"})
