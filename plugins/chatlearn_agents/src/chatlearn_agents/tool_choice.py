"""The choice of a registered tool source in the options of an environment: ``{kind: search, path: corpus.jsonl}``.

A text is short for a source without options (``calculator``), or for a function (``package.module:function``). The
registry comes from the validation context of a configuration; elsewhere it is that of the installed plugins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler, SerializationInfo, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from chatlearn_config.problems import Problem
from chatlearn_core.config.choices import PLUGINS, validate_options
from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import ToolSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.select import load_factory

if TYPE_CHECKING:
    from chatlearn_core.protocols import ToolSource

KIND = "kind"
"""Key that names the source; the other keys are its options."""
FUNCTION = "function"
"""The source that a text with a colon is short for."""
_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "object", "properties": {KIND: {"type": "string"}}, "required": [KIND]}]
}


@dataclass(slots=True, frozen=True)
class ToolChoice:
    """A source of tools with its options."""

    record: ToolSpec
    options: BaseModel
    origin: str
    """Distribution and version that registered the source."""

    def source(self) -> ToolSource:
        """Import and build the source.

        Raises:
            PluginError: its code cannot be imported.
        """
        built: ToolSource = load_factory(self.record, "factory", self.origin)(self.options)
        return built

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(
            _chosen, serialization=core_schema.plain_serializer_function_ser_schema(_written, info_arg=True)
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return dict(_SCHEMA)


def _written(choice: ToolChoice, info: SerializationInfo) -> dict[str, Any]:
    """The choice as a configuration has it."""
    return {KIND: choice.record.name, **choice.options.model_dump(mode=info.mode, by_alias=bool(info.by_alias))}


def _chosen(value: Any, info: core_schema.ValidationInfo) -> ToolChoice:
    if isinstance(value, ToolChoice):
        return value
    registry = (info.context or {}).get(PLUGINS) or _installed()
    if isinstance(value, str):
        value = _spelled_out(value, registry)
    if not isinstance(value, Mapping):
        raise ValueError("must be a text, or a mapping with a kind")
    if not isinstance(name := value.get(KIND), str):
        raise _refused("string_type" if KIND in value else "missing", name)
    record, model = _selected(name, registry)
    options = {key: given for key, given in value.items() if key != KIND}
    if info.mode == "json":
        made, problems = validate_options(model, options, (), record)
        if made is None or problems:
            raise ValidationError.from_exception_data(name, [_error(problem, options) for problem in problems])
    else:
        made = model.model_validate(options)
    return ToolChoice(record, made, registry.origin(record))


def _spelled_out(text: str, registry: PluginRegistry) -> Mapping[str, Any]:
    """What a text is short for."""
    if any(record.name == text for record in registry.records("tool")) or ":" not in text:
        return {KIND: text}
    return {KIND: FUNCTION, "path": text}


def _selected(name: str, registry: PluginRegistry) -> tuple[ToolSpec, type[BaseModel]]:
    try:
        record = registry.select("tool", name)
        model = registry.load_options(record)
    except PluginError as error:
        hint = "\n  A function is named package.module:function."
        raise _refused(PydanticCustomError(KIND, f"{error}{hint}"), name) from error
    if KIND in model.model_fields:
        raise ValueError(
            f"the tool {name!r} ({registry.origin(record)}) has an option named kind, which no configuration can set; "
            "its authors must rename it"
        )
    return record, model


def _error(problem: Problem, options: Mapping[str, Any]) -> InitErrorDetails:
    """A problem of the options as an error of pydantic, which puts the place of the choice before it."""
    if problem.rule == "required key is missing":
        return InitErrorDetails(type="missing", loc=problem.path, input=options)
    text = "\n".join(part for part in (problem.rule, problem.remedy.strip("\n")) if part)
    value = options
    for part in problem.path:
        value = value[part]  # type: ignore[index]  # a path within the options
    return InitErrorDetails(type=PydanticCustomError("option", text), loc=problem.path, input=value)


def _refused(error: PydanticCustomError | str, name: Any) -> ValidationError:
    return ValidationError.from_exception_data("tool", [InitErrorDetails(type=error, loc=(KIND,), input=name)])


@cache
def _installed() -> PluginRegistry:
    return discover_plugins()
