"""Arguments of a flow's call: JSON constants, checked by the pydantic model named in the method's record."""

from __future__ import annotations

import difflib
import inspect
import math
from typing import Any, get_args

from pydantic import ValidationError

from chatlearn_core.exceptions import FlowError
from chatlearn_core.flow.graph import FunctionCall
from chatlearn_core.flow.symbols import Samples
from chatlearn_core.flow.vocabulary import FlowVocabulary
from chatlearn_core.plugins.import_string import import_string_problem, resolve_import_string
from chatlearn_core.plugins.records import FlowMethodSpec, Granularity


def checked_arguments(
    label: str, method: FlowMethodSpec, given: dict[str, Any], vocabulary: FlowVocabulary, source: str
) -> dict[str, Any]:
    """The checked arguments of a call; arguments that are None count as omitted.

    Args:
        label: role and method, for messages.
        given: the call's arguments without ``name``, which every method has.
        source: ``file:line`` of the call.

    Raises:
        FlowError: an argument is not a constant, unknown, missing, or invalid for the method.
    """
    check_constants(label, given, source)
    model = vocabulary.load_arguments(method)
    try:
        model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = [*model.model_fields, "name"]
            hint = difflib.get_close_matches(place, known, n=1)
            raise FlowError(
                f"{source}: {label} has no argument {place!r}; it takes {', '.join(known)}"
                + (f". Did you mean {hint[0]!r}?" if hint else "")
            ) from error
        if first["type"] == "missing":
            raise FlowError(f"{source}: {label} needs the argument {place!r}") from error
        raise FlowError(f"{source}: {label}({place}={first['input']!r}): {first['msg']}") from error
    return {name: value for name, value in given.items() if value is not None}


def check_constants(label: str, given: dict[str, Any], source: str) -> None:
    """Raises FlowError if an argument is not a number, text, a truth value, None, or a list or dict of these."""
    for name, value in given.items():
        if isinstance(value, Samples):
            raise FlowError(
                f"{source}: {label}({name}=...) is given samples; arguments are constants. Pass samples first, joined "
                "with m.join if there are several"
            )
        if not _is_json(value):
            raise FlowError(
                f"{source}: {label}({name}={value!r:.80}) is a {type(value).__name__}; an argument is a number, text, "
                "a truth value, None, or a list or dict of these"
            )


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)


def checked_function(
    name: Any, granularity: Any, timeout_s: Any, arguments: dict[str, Any], source: str
) -> FunctionCall:
    """The function named by ``m.apply``.

    Raises:
        FlowError: the function cannot be imported or called with these arguments.
    """
    if problem := import_string_problem(name):
        raise FlowError(f"{source}: m.apply: {problem}")
    try:
        function = resolve_import_string(name)
    except (Exception, SystemExit) as error:
        raise FlowError(f"{source}: m.apply({name!r}) cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise FlowError(f"{source}: m.apply({name!r}) is a {type(function).__name__}; it must be a function")
    if granularity not in get_args(Granularity):
        raise FlowError(f"{source}: m.apply(granularity={granularity!r}): one of {', '.join(get_args(Granularity))}")
    if type(timeout_s) not in (int, float) or not 0 < timeout_s < math.inf:
        raise FlowError(f"{source}: m.apply(timeout_s={timeout_s!r}): a number of seconds above 0")
    target = FunctionCall(name, function, granularity, float(timeout_s))
    try:
        inspect.signature(function).bind([], **{key: value for key, value in arguments.items() if key != "name"})
    except TypeError as error:
        raise FlowError(
            f"{source}: m.apply: {target.place} cannot be called with a list of samples and the arguments "
            f"{', '.join(arguments) or 'none'}: {error}"
        ) from error
    except ValueError:
        pass  # no signature is known, such as for a function written in C: the call itself will show an error
    return target
