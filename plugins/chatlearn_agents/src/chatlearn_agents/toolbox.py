"""The tools of an environment: opens their sources, checks their schemas, and answers calls within limits."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from chatlearn_agents.options import ToolsOptions
from chatlearn_agents.shortened import shortened
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import TOOL_NAME, Tool, ToolError, ToolSource

_LOG = logging.getLogger(__name__)
_SHOWN = 300
"""Characters of an error's text that the model sees."""
MAX_ARGUMENT_CHARS = 1 << 20
Outcome = Literal["ok", "unknown_tool", "bad_arguments", "failed", "timed_out", "refused"]


@dataclass(slots=True, frozen=True)
class ToolResult:
    """The answer to one call, as the model sees it."""

    text: str
    outcome: Outcome
    """``refused``: the turn had more calls than are run."""
    truncated: bool = False


class Toolbox:
    """All tools of one environment.

    Args:
        sources: where the tools come from, each with the configuration key that names it.
    """

    def __init__(self, sources: Sequence[tuple[str, ToolSource]], options: ToolsOptions) -> None:
        self._sources = sources
        self._options = options
        self._tools: dict[str, tuple[Tool, Any]] = {}
        self._free = asyncio.Semaphore(options.max_concurrent_calls)

    def open(self) -> None:
        """Open the sources.

        Raises:
            ConfigError: a source, a name or a schema is wrong, or two tools have one name; names the key.
        """
        for key, source in self._sources:
            for tool in source.open():
                if not TOOL_NAME.fullmatch(tool.name):
                    raise ConfigError(
                        f"{key}: {tool.name!r:.80} is no name of a tool; use at most 64 letters, digits, _, - and ., "
                        "with a letter or _ first"
                    )
                if tool.name in self._tools:
                    raise ConfigError(f"{key}: there are two tools named {tool.name!r}; set name or prefix for one")
                self._tools[tool.name] = (tool, checked_schema(tool.parameters, f"{key}: the schema of {tool.name!r}"))

    def close(self) -> None:
        """Close every source, even if one fails. Safe to call twice."""
        for key, source in self._sources:
            try:
                source.close()
            except Exception:  # the others must be closed, too
                _LOG.exception("%s did not close", key)

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [tool.for_template() for tool, _ in self._tools.values()]

    async def answer(self, calls: Sequence[tuple[str, str]]) -> list[ToolResult]:
        """Answer the calls of one turn, all at once, in their order.

        Args:
            calls: (name, JSON of the arguments).
        """
        run = calls[: self._options.max_calls_per_turn]
        refused = ToolResult(
            f"error: not run, because a turn may have at most {self._options.max_calls_per_turn} calls", "refused"
        )
        answers = await asyncio.gather(*(self._answered(*call) for call in run))
        return [*answers, *[refused] * (len(calls) - len(run))]

    async def _answered(self, name: str, arguments_json: str) -> ToolResult:
        known = self._tools.get(name)
        if known is None:
            return self._result(f"error: no tool {name!r:.80}; there are {', '.join(self._tools)}", "unknown_tool")
        tool, validator = known
        arguments = _arguments(arguments_json)
        problem = _problem(arguments, validator)
        if problem is not None:
            return self._result(f"error: the arguments of {name} are wrong: {problem}", "bad_arguments")
        async with self._free:
            return await self._ran(tool, arguments)

    async def _ran(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        result = ToolResult("", "failed")
        for _ in range(self._options.retries + 1):
            limit = asyncio.timeout(self._options.timeout_s)
            try:
                async with limit:
                    text = await tool.run(arguments)
                if not isinstance(text, str):
                    raise ToolError(f"it returned {type(text).__name__}, not text")
                return self._result(text, "ok")
            except ToolError as error:
                return self._result(f"error: {tool.name}: {str(error)[:_SHOWN]}", "failed")
            except Exception as error:  # tools are third-party code and may raise anything
                if isinstance(error, TimeoutError) and limit.expired():
                    words = f"error: {tool.name} did not answer within {self._options.timeout_s:g} s"
                    result = self._result(words, "timed_out")
                else:
                    _LOG.info("tool %s raised", tool.name, exc_info=error)
                    words = f"error: {tool.name} raised {type(error).__name__}: {str(error)[:_SHOWN]}"
                    result = self._result(words, "failed")
        return result

    def _result(self, text: str, outcome: Outcome) -> ToolResult:
        limit = self._options.max_result_chars
        return ToolResult(shortened(text, limit), outcome, len(text) > limit)


def checked_schema(schema: Any, what: str) -> Any:
    """The validator of a schema.

    Raises:
        ConfigError: it is no JSON Schema of an object; the message begins with ``what``.
    """
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        raise ConfigError(f"{what} is not of an object: it is {schema!r:.100}; set type: object, and properties")
    try:
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"{what} is not a JSON Schema: at {error.json_path}: {error.message[:200]}") from error
    except (RecursionError, re.error) as error:
        raise ConfigError(f"{what} is not a JSON Schema: {error}") from error
    return kind(schema, registry=Registry())


def _arguments(text: str) -> Any:
    if len(text) > MAX_ARGUMENT_CHARS:
        return None
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def _problem(arguments: Any, validator: Any) -> str | None:
    if not isinstance(arguments, Mapping):
        return f"they must be a JSON object of at most {MAX_ARGUMENT_CHARS} characters"
    try:
        error = best_match(validator.iter_errors(arguments))
    except (Unresolvable, RecursionError, re.error) as raised:
        return f"they cannot be checked: {raised}"
    return None if error is None else f"at {error.json_path}: {error.message[:_SHOWN]}"
