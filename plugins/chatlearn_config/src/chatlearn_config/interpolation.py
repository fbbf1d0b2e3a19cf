"""Resolves ``${...}`` in a configuration with OmegaConf, and reports every failure with its key.

``${train.steps}`` inserts another setting (its default if the file does not set it), ``${.x}`` a sibling,
``${oc.env:X,default}`` an environment variable (always text: ``${oc.decode:${oc.env:X}}`` converts it to a number), and
``\\${`` is a literal ``${``. ``???`` marks a value that must be overridden.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from pydantic import BaseModel

from chatlearn_config.expansion import too_large
from chatlearn_config.fields import model_at
from chatlearn_config.problems import KeyPath, Problem, nearest

_MUST_SET = "???"


def resolve(values: Mapping[Any, Any], model: type[BaseModel]) -> tuple[dict[Any, Any], list[Problem], list[KeyPath]]:
    """The values with every interpolation replaced.

    Args:
        values: the settings as written and overridden.
        model: what they will be validated with; an interpolation can name settings that have their default.

    Returns:
        The resolved values, without keys that could not be resolved; a problem for each of those; their paths.
    """
    problems: list[Problem] = list(too_large(values))
    usable = _without_malformed(values, (), problems, frozenset(problem.path for problem in problems))
    context = OmegaConf.create(_with_defaults(usable, model))
    # An unset top-level setting whose default interpolates (output_dir) is resolved like one that is written.
    wanted = {**_interpolated_defaults(model), **usable}
    resolved = _resolve_mapping(context, wanted, (), problems)
    return resolved, problems, [problem.path for problem in problems]


def _interpolated_defaults(model: type[BaseModel]) -> dict[str, str]:
    return {
        name: info.default
        for name, info in model.model_fields.items()
        if isinstance(info.default, str) and "${" in info.default
    }


def _without_malformed(value: Any, path: KeyPath, problems: list[Problem], too_large: Collection[KeyPath]) -> Any:
    """A copy without the strings that OmegaConf cannot parse, because it would reject everything because of them."""
    if path in too_large:
        return _DROP
    if isinstance(value, dict):
        kept = {key: _without_malformed(child, (*path, key), problems, too_large) for key, child in value.items()}
        return {key: child for key, child in kept.items() if child is not _DROP}
    if isinstance(value, list):
        items = [_without_malformed(child, (*path, index), problems, too_large) for index, child in enumerate(value)]
        return [None if item is _DROP else item for item in items]
    if isinstance(value, str) and "${" in value:
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException as error:
            problems.append(Problem(path, f"malformed interpolation: {_first_line(error)}", value, _ESCAPE))
            return _DROP
        except RecursionError:
            problems.append(Problem(path, "malformed interpolation: nested too deeply", value, _ESCAPE))
            return _DROP
    return value


_DROP = object()
_ESCAPE = "write ${key} to insert another setting, \\${ for a literal '${'"


def _with_defaults(values: Any, model: type[BaseModel] | None) -> Any:
    """The values merged over their sections' plain defaults, so that an interpolation can name any setting."""
    if isinstance(values, list):
        return [_with_defaults(item, None) for item in values]
    if not isinstance(values, dict) or model is None:
        return values
    result: dict[Any, Any] = {}
    for name, info in model.model_fields.items():
        if not info.is_required() and name not in values:
            default = info.get_default(call_default_factory=True)
            result[name] = default.model_dump() if isinstance(default, BaseModel) else default
    for key, child in values.items():
        below = model_at(model, (key,))
        named = model_at(model, (key, "")) if below is None else None  # a mapping of names to sections
        if named is not None and isinstance(child, dict):
            result[key] = {name: _with_defaults(one, named) for name, one in child.items()}
        else:
            result[key] = {} if child is None and below is not None else _with_defaults(child, below)
    return result


def _resolve_mapping(
    node: DictConfig, shape: Mapping[Any, Any], path: KeyPath, problems: list[Problem]
) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key, child in shape.items():
        value = _resolve_child(node, key, child, (*path, key), problems)
        if value is not _DROP:
            result[key] = value
    return result


def _resolve_child(node: DictConfig | ListConfig, key: Any, shape: Any, path: KeyPath, problems: list[Problem]) -> Any:
    if not isinstance(shape, (dict, list, str)):
        return shape
    if isinstance(shape, dict) and isinstance(node[key], DictConfig):
        return _resolve_mapping(node[key], shape, path, problems)
    if isinstance(shape, list):
        items = [_resolve_child(node[key], index, item, (*path, index), problems) for index, item in enumerate(shape)]
        return [None if item is _DROP else item for item in items]
    try:
        value = node[key]
        if isinstance(value, (DictConfig, ListConfig)):
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as error:
        problems.append(_problem(error, node, shape, path))
        return _DROP
    return value


def _problem(error: Exception, node: DictConfig | ListConfig, value: Any, path: KeyPath) -> Problem:
    if isinstance(error, MissingMandatoryValue):
        if value == _MUST_SET:
            return Problem(path, "'???' marks a value that must be set", remedy="set it in the file or by override")
        return Problem(path, "the interpolation reaches a value that must be set ('???')", value)
    if isinstance(error, RecursionError):
        return Problem(path, "the interpolation leads back to itself", value)
    message = _first_line(error)
    if "ecursi" in message or "parent node" in message:
        return Problem(path, "the interpolation leads back to itself", value, "break the cycle with a plain value")
    if isinstance(error, InterpolationToMissingValueError):
        return Problem(path, "the interpolation reaches a value that must be set ('???')", value)
    if isinstance(error, InterpolationKeyError):
        return Problem(path, message, value, _suggest(message, node))
    remedy = "export it, or give a default: ${oc.env:NAME,default}" if "Environment variable" in message else ""
    return Problem(path, f"the interpolation fails: {message}", value, remedy)


def _suggest(message: str, node: DictConfig | ListConfig) -> str:
    """The nearest key to the one named in an 'Interpolation key ... not found' message."""
    wanted = message.split("'")[1] if message.count("'") >= 2 else ""
    root = node._get_root()
    parts = wanted.strip(".").split(".")
    parent = OmegaConf.select(root, ".".join(parts[:-1])) if len(parts) > 1 else root
    if not isinstance(parent, DictConfig):
        return "keys start at the top of the file; '${.name}' is a sibling"
    guess = nearest(parts[-1], [str(key) for key in parent])
    return f"did you mean '{'.'.join([*parts[:-1], guess])}'?" if guess else "keys start at the top of the file"


def _first_line(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    return line.replace(" raised while resolving interpolation", "").removeprefix("KeyError: ").strip('"')
