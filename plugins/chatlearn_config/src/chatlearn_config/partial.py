"""Validates settings although parts of them are faulty, so that one check reports every problem."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from chatlearn_config.fields import model_at, valid_keys
from chatlearn_config.problems import KeyPath, Problem, nearest, overlaps
from chatlearn_config.validation import problems_of

Settings = TypeVar("Settings", bound=BaseModel)
_FINE_ATTEMPTS = 4
"""Number of attempts that remove only the faulty keys; later attempts remove the sections around them."""
_MAX_ATTEMPTS = 8


def validate(
    values: Mapping[Any, Any], model: type[Settings], placeholders: Mapping[str, Any], tainted: list[KeyPath]
) -> tuple[Settings | None, list[Problem]]:
    """The settings and their problems.

    If there are problems, the settings are built without the faulty parts, so that the rest can be checked for
    conflicts. None if nothing remains.

    Args:
        values: what to validate.
        model: what to validate it with.
        placeholders: values for required top-level sections that are missing or faulty.
        tainted: the paths that are unreliable; extended by the parts left out.
    """
    told: list[Problem] = []
    usable: dict[Any, Any] = copy.deepcopy(dict(values))
    for attempt in range(_MAX_ATTEMPTS):
        try:
            return model.model_validate(usable), told
        except ValidationError as error:
            problems = problems_of(error, model, usable)
        if attempt == 0:
            # A key that could not be resolved is now missing; its problem is already reported.
            told = [problem for problem in problems if not is_consequence(problem, tainted)]
        for problem in problems:
            tainted.append(_without(usable, problem, model, placeholders, whole_section=attempt > _FINE_ATTEMPTS))
    return None, told


def _without(
    values: dict[Any, Any],
    problem: Problem,
    model: type[BaseModel],
    placeholders: Mapping[str, Any],
    whole_section: bool,
) -> KeyPath:
    """Remove the faulty part from the values; returns the path whose values are no longer reliable."""
    if problem.rule == "unknown key":
        _delete(values, problem.path)
        section = model_at(model, problem.path[:-1])
        guess = nearest(str(problem.path[-1]), valid_keys(section)) if section else None
        return (*problem.path[:-1], guess or problem.path[-1])
    path = problem.path
    missing = problem.rule == "required key is missing"
    if missing:
        path = path[:-1]
    while path and isinstance(path[-1], int):  # removing one item would shift the others
        path = path[:-1]
    if len(path) <= 1 or whole_section:
        top = str(problem.path[0]) if problem.path else ""
        values.pop(top, None)
        if top in placeholders:
            values[top] = copy.deepcopy(placeholders[top])
        return problem.path[:1]
    _delete(values, path)
    return problem.path


def _delete(values: Any, path: KeyPath) -> None:
    """Delete the key; it may already be gone because of another problem."""
    for part in path[:-1]:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(values, dict):
        values.pop(path[-1], None)


def is_consequence(problem: Problem, tainted: Iterable[KeyPath]) -> bool:
    """Whether a problem may only be a consequence of another one that is already listed."""
    return any(overlaps(path, bad) for bad in tainted for path in problem.paths())
