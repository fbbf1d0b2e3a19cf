"""Imports a function, calls it by its signature and checks its scores, in the workers of reward ``function``."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from chatlearn_rewards.pool_worker import TaskConfigError, describe_exception

Verdict = dict[str, Any]
"""``{"value", "components"}``, with ``answer`` if the function gives one, or ``{"error"}``."""

COMPUTE_SCORE_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
LIST_PARAMETERS = ("prompts", "completions")
NO_SCORE = "no score: the function returned None (not applicable to this sample)"


def build_function_caller(
    path: str, signature: str, conversational: bool, directory: str
) -> Callable[[Sequence[Mapping[str, Any]]], list[Verdict]]:
    """Return a function that maps sample rows to one verdict per row.

    Raises:
        TaskConfigError: no such module, file or function, or an unknown signature.
    """
    function = find_function(path, Path(directory))
    parameters = inspect.signature(function).parameters
    style = detect_signature(path, parameters) if signature == "auto" else signature
    loop = asyncio.new_event_loop()

    def finished(result: Any) -> Any:
        return loop.run_until_complete(result) if inspect.isawaitable(result) else result

    def score_row(row: Mapping[str, Any]) -> Any:
        return finished(_call_compute_score(function, parameters, row))

    def call(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        if style == "compute_score":
            return [_guarded(partial(score_row, row)) for row in rows]
        scores = finished(_call_with_lists(function, parameters, rows, conversational))
        return check_list(scores, len(rows))

    return call


def find_function(path: str, directory: Path) -> Callable[..., Any]:
    """The function that ``package.module:name`` or ``file.py:name`` names; a file is relative to ``directory``."""
    location, _, name = path.rpartition(":")
    if location.endswith(".py"):
        module = _load_file(path, (directory / location).resolve())
    else:
        sys.path.insert(0, str(directory))
        try:
            module = importlib.import_module(location)
        except ModuleNotFoundError as error:
            if error.name is None or not (location + ".").startswith(error.name + "."):
                raise  # a module that the user's module imports
            raise TaskConfigError(
                f"path {path!r}: no module named {error.name!r}, neither installed nor in {directory}; a file is "
                f"written with its ending: path/to/file.py:function"
            ) from error
    function = getattr(module, name, None)
    if function is None:
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        nearest = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has: {', '.join(sorted(names)) or 'no function'}"
        raise TaskConfigError(f"path {path!r}: {module.__file__} has no function {name!r}; {hint}")
    if not callable(function):
        raise TaskConfigError(f"path {path!r}: {name!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]  # found by name, checked to be callable


def _load_file(path: str, file: Path) -> Any:
    if not file.is_file():
        folder = file.parent
        names = [entry.name for entry in folder.glob("*.py")] if folder.is_dir() else []
        nearest = difflib.get_close_matches(file.name, names, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise TaskConfigError(f"path {path!r}: there is no file {file}{hint}")
    sys.path.insert(0, str(file.parent))  # the file's own imports of its neighbours
    specification = importlib.util.spec_from_file_location(file.stem, file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[file.stem] = module
    specification.loader.exec_module(module)
    return module


def detect_signature(path: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    """``lists`` or ``compute_score``, by the names of the parameters."""
    if "completions" in parameters:
        return "lists"
    if "solution_str" in parameters:
        return "compute_score"
    raise TaskConfigError(
        f"path {path!r}: cannot tell how to call a function of ({', '.join(parameters)}). Expected "
        f"compute_score(data_source, solution_str, ground_truth, extra_info=None) or f(prompts, completions, "
        f"**columns); rename the parameters or set the option 'signature' to compute_score or lists"
    )


def check_score(score: Any) -> Verdict:
    """One score as a verdict: a finite number, or a dict with ``score`` whose other numbers become components, whose
    text ``answer`` is the answer that was graded, and whose list ``steps`` has (end, reward) of each step.
    """
    components: dict[str, float] = {}
    steps: list[list[float]] | None = None
    if isinstance(score, Mapping) and score.get("steps") is not None:
        try:
            steps = [[int(end), float(reward)] for end, reward in score["steps"]]
        except (TypeError, ValueError, OverflowError):
            return {"error": f"the function returned the steps {_shown(score['steps'])}; a step is (end, reward)"}
        if not all(math.isfinite(reward) for _, reward in steps):
            return {"error": f"the function returned the steps {_shown(score['steps'])}; rewards must be finite"}
    answer = score.get("answer") if isinstance(score, Mapping) else None
    if isinstance(score, Mapping):
        if "score" not in score:
            return {"error": f"the function returned a dict without 'score'; its keys are {sorted(map(str, score))}"}
        for name, part in score.items():
            number = _number(part)
            if name not in ("score", "steps") and number is not None and math.isfinite(number):
                components[str(name)] = number
        score = score["score"]
    if score is None:
        return {"error": NO_SCORE}
    number = _number(score)
    if number is None:
        return {"error": f"the function returned {_shown(score)}; a score is a number or a dict with 'score'"}
    if not math.isfinite(number):
        return {"error": f"the function returned {number}; a score must be finite"}
    more: Verdict = {} if steps is None else {"steps": steps}
    return {"value": number, "components": components} | more | ({"answer": answer} if isinstance(answer, str) else {})


def check_list(scores: Any, count: int) -> list[Verdict]:
    """Return one verdict per sample; a wrong number of scores is an error of all samples."""
    try:
        items = list(scores)
    except TypeError:
        items = None
    if items is None or isinstance(scores, str | bytes | Mapping):
        return [{"error": f"the function returned {_shown(scores)}; expected a list of {count} scores"}] * count
    if len(items) != count:
        return [{"error": f"the function returned {len(items)} scores for {count} samples"}] * count
    return [check_score(score) for score in items]


def _number(value: Any) -> float | None:
    if isinstance(value, str | bytes | complex) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ):  # RuntimeError: torch, of a tensor with several elements
        return None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:100]}{'...' if len(text) > 100 else ''} (a {type(value).__name__})"


def _guarded(compute: Callable[[], Any]) -> Verdict:
    try:
        return check_score(compute())
    except Exception as error:  # a user's function may raise anything; the sample gets the error, shown in full
        return {"error": describe_exception(error)}


def _accepts_any_name(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def _call_compute_score(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], row: Mapping[str, Any]
) -> Any:
    named = {name: row[name] for name in COMPUTE_SCORE_PARAMETERS}
    if "solution_str" not in parameters and not _accepts_any_name(parameters):
        return function(*list(named.values())[: len(parameters)])  # other names: by position
    return function(**{n: v for n, v in named.items() if n in parameters or _accepts_any_name(parameters)})


def _call_with_lists(
    function: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    rows: Sequence[Mapping[str, Any]],
    conversational: bool,
) -> Any:
    columns: dict[str, list[Any]] = {}
    for name in sorted({name for row in rows for name in row["columns"]}):
        columns[name] = [row["columns"].get(name) for row in rows]
    for name in ("data_source", "ground_truth", "completion_ids"):
        columns[name] = [row[name] for row in rows]
    if conversational:
        columns["prompts"] = [row["messages"] for row in rows]
        columns["completions"] = [[{"role": "assistant", "content": row["solution_str"]}] for row in rows]
    else:
        columns["prompts"] = [row["prompt"] for row in rows]
        columns["completions"] = [row["solution_str"] for row in rows]
    if "completions" not in parameters and not _accepts_any_name(parameters):
        return function(columns["prompts"], columns["completions"])  # other names: by position
    needed = {
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    if missing := sorted(needed - columns.keys()):
        raise TypeError(f"the function needs the columns {missing}; the rows have {sorted(columns)}")
    return function(**{n: v for n, v in columns.items() if n in parameters or _accepts_any_name(parameters)})
