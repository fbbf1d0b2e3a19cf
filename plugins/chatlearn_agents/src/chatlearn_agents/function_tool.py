"""A Python function as a tool: its schema from signature and docstring, its arguments and result checked."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from chatlearn_agents.options import FunctionToolOptions
from chatlearn_agents.tool_threads import ToolThreads
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.protocols import Tool, ToolError

_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class FunctionTools:
    """The source of one function."""

    def __init__(self, options: FunctionToolOptions) -> None:
        self._options = options

    def open(self) -> Sequence[Tool]:
        """Import the function; see ``ToolSource``."""
        path = self._options.path
        try:
            function = resolve_import_string(path)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"tool {path!r} cannot be imported: {error}") from error
        if not callable(function):
            raise ConfigError(f"tool {path!r} is a {type(function).__name__}, not a function")
        return [function_tool(function, self._options)]

    def close(self) -> None:
        """Nothing to release."""


def function_tool(function: Callable[..., Any], options: FunctionToolOptions) -> Tool:
    """The tool that calls a function.

    Arguments are converted to the annotated types by pydantic. A result that is not of the annotated return type, or
    is neither text nor JSON, is an error of the tool.

    Raises:
        ConfigError: an argument cannot be given by name, or an annotation has no JSON Schema.
    """
    path = options.path
    arguments = _arguments_model(function, path)
    described = docstring_parser.parse(inspect.getdoc(function) or "")
    summary = options.description or "\n\n".join(
        part for part in (described.short_description, described.long_description) if part
    )
    try:
        schema = _schema_of(arguments) if options.parameters is None else options.parameters
    except PydanticUserError as error:
        raise ConfigError(
            f"tool {path!r}: its arguments have no JSON Schema: {error.message}. Annotate them with JSON types, or "
            "set parameters"
        ) from error
    returned = _return_type(function, path)
    threads = ToolThreads(path)

    def call(given: Mapping[str, Any]) -> str:
        try:
            checked = arguments.model_validate(dict(given))
        except ValidationError as error:
            raise ToolError(_problems(error)) from error
        values = {name: getattr(checked, field) for field, name in names.items() if field in checked.model_fields_set}
        result = function(**values)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return _text(result, returned, path)

    names = {field: info.alias or field for field, info in arguments.model_fields.items()}

    async def run(given: Mapping[str, Any]) -> str:
        return await threads.run(lambda: call(given))

    name = options.name or str(getattr(function, "__name__", "function"))
    return Tool(name, summary, schema, run)


def _schema_of(arguments: type[BaseModel]) -> dict[str, Any]:
    """Without the titles that pydantic adds, which repeat the names."""
    schema = arguments.model_json_schema()
    properties = {
        name: {key: value for key, value in one.items() if key != "title"}
        for name, one in schema.get("properties", {}).items()
    }
    return {key: value for key, value in schema.items() if key != "title"} | {"properties": properties}


async def _awaited(result: Any) -> Any:
    return await result


def _arguments_model(function: Callable[..., Any], path: str) -> type[BaseModel]:
    hints = _hints(function, path)
    about = {one.arg_name: one.description for one in docstring_parser.parse(inspect.getdoc(function) or "").params}
    fields: dict[str, Any] = {}
    for index, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if parameter.kind in _UNNAMED:
            raise ConfigError(
                f"tool {path!r}: its parameter {parameter} cannot be given by name; give a tool ordinary or "
                "keyword-only parameters"
            )
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        # The alias keeps names that pydantic reserves, such as `model_config`.
        info = Field(default, alias=name, description=about.get(name))
        fields[f"argument_{index}"] = (hints.get(name, Any), info)
    try:
        return create_model("Arguments", __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)
    except (PydanticUserError, TypeError) as error:
        raise ConfigError(f"tool {path!r}: its annotations cannot be read: {error}") from error


def _return_type(function: Callable[..., Any], path: str) -> TypeAdapter[Any] | None:
    annotation = _hints(function, path).get("return", Any)
    if annotation is Any:
        return None
    try:
        return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # a type with a configuration of its own: a model or a dataclass
        return TypeAdapter(annotation)


def _hints(function: Callable[..., Any], path: str) -> dict[str, Any]:
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"tool {path!r}: its annotations cannot be read: {error}") from error


def _text(result: Any, returned: TypeAdapter[Any] | None, path: str) -> str:
    if returned is not None:
        try:
            result = returned.validate_python(result, strict=True)
        except ValidationError as error:
            raise ToolError(
                f"{path} returned {type(result).__name__}, which is not what it declares: {error.errors()[0]['msg']}"
            ) from error
    if isinstance(result, str):
        return result
    try:
        return json.dumps(to_jsonable_python(result), ensure_ascii=False)
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise ToolError(f"{path} returned {type(result).__name__}, which is neither text nor JSON") from error


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:5])
