"""Formats for completions to compare, and for single completions with a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chatlearn_core.data.format import Content, RawExample, Row
from chatlearn_core.exceptions import DataError
from chatlearn_data.formats import columns
from chatlearn_data.options import NoOptions, PreferenceOptions

_ANSWERS = ("reward_model.ground_truth", "ground_truth", "answer")


class PreferenceFormat:
    """``chosen`` and ``rejected``, texts or messages, with a ``prompt``; or two conversations with a common beginning.

    Conversations may repeat the prompt. The chosen completion has rank 1 and the rejected one 0, unless the options
    name columns with their scores.
    """

    answer_columns = _ANSWERS
    completion_columns = ("chosen", "rejected")
    answer_required = False

    def __init__(self, options: PreferenceOptions) -> None:
        self._scores = (options.chosen_score, options.rejected_score)

    def parse(self, row: Row) -> RawExample:
        sides: list[Content] = [columns.prompt(row, "chosen"), columns.prompt(row, "rejected")]
        if columns.optional(row, "prompt") is None:
            prompt = _common_start(*sides)
            sides = [side[len(prompt) :] for side in sides]
        else:
            prompt = columns.prompt(row, "prompt")
            sides = [_without_prompt(side, prompt) for side in sides]
        return RawExample(
            prompt=prompt,
            completion=sides[0],
            completions=sides,
            ranks=self._ranks(row),
            ground_truth=columns.first_answer(row, _ANSWERS),
            data_source=columns.optional_text(row, "data_source"),
            id=columns.identifier(row, "id"),
            tools=columns.tools(row),
            columns=columns.rest(row, ("prompt", "id", "data_source", "chosen", "rejected")),
        )

    def _ranks(self, row: Row) -> tuple[float, float]:
        chosen, rejected = self._scores
        if chosen is None or rejected is None:
            return 1.0, 0.0
        ranks = _number(columns.required(row, chosen), chosen), _number(columns.required(row, rejected), rejected)
        if ranks[0] <= ranks[1]:
            raise DataError(
                f"the chosen completion must have a higher score than the rejected one: {chosen} is {ranks[0]:g}, "
                f"{rejected} is {ranks[1]:g}"
            )
        return ranks


class RankedFormat:
    """``prompt`` with a list ``completions`` of texts or messages, and one list of verdicts of the same length.

    The verdicts are ``scores`` (the largest is the best), ``ranks`` (1 is the best) or ``labels`` (true is good).
    """

    answer_columns = _ANSWERS
    completion_columns = ("completions",)
    answer_required = False

    def __init__(self, options: NoOptions) -> None:
        del options

    def parse(self, row: Row) -> RawExample:
        prompt = columns.prompt(row, "prompt")
        completions = [
            _without_prompt(columns.prompt({"completions": one}, "completions"), prompt)
            for one in _listed(row, "completions")
        ]
        given = [name for name in ("scores", "ranks", "labels") if columns.optional(row, name) is not None]
        if len(given) != 1:
            raise DataError(
                "completions need one of the columns 'scores' (the largest is the best), 'ranks' (1 is the best) and "
                f"'labels'; the row has {' and '.join(map(repr, given)) or 'none of them'}"
            )
        [name] = given
        verdicts = _listed(row, name)
        labels = verdicts if name == "labels" else ()
        ranks = [] if labels else [_number(one, name) * (-1 if name == "ranks" else 1) for one in verdicts]
        order = [float(label is True) for label in labels] or ranks
        best = max(range(len(order)), key=order.__getitem__)
        is_good = best < len(completions) and (not labels or labels[best] is True)
        return RawExample(
            prompt=prompt,
            completion=completions[best] if is_good else None,
            completions=completions,
            ranks=ranks,
            labels=labels,
            ground_truth=columns.first_answer(row, _ANSWERS),
            data_source=columns.optional_text(row, "data_source"),
            id=columns.identifier(row, "id"),
            tools=columns.tools(row),
            columns=columns.rest(row, ("prompt", "id", "data_source", "completions", name)),
        )


class LabelledFormat:
    """``prompt`` and ``completion`` with a ``label``: true for a good completion, false for a bad one."""

    answer_columns = _ANSWERS
    completion_columns = ("completion",)
    answer_required = False

    def __init__(self, options: NoOptions) -> None:
        del options

    def parse(self, row: Row) -> RawExample:
        prompt = columns.prompt(row, "prompt")
        completion = _without_prompt(columns.prompt(row, "completion"), prompt)
        label = columns.required(row, "label")
        if not isinstance(label, bool):
            raise DataError(f"column 'label' must be true or false, not {label!r:.60}")
        return RawExample(
            prompt=prompt,
            completion=completion if label else None,
            completions=(completion,),
            labels=(label,),
            ground_truth=columns.first_answer(row, _ANSWERS),
            data_source=columns.optional_text(row, "data_source"),
            id=columns.identifier(row, "id"),
            tools=columns.tools(row),
            columns=columns.rest(row, ("prompt", "id", "data_source", "completion", "label")),
        )


def _common_start(chosen: Content, rejected: Content) -> Content:
    """Return the common beginning of two conversations as the prompt."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError(
            "column 'prompt' is missing, and 'chosen' and 'rejected' are not both conversations with a common "
            "beginning to use as the prompt"
        )
    count = 0
    while count < min(len(chosen), len(rejected)) and chosen[count] == rejected[count]:
        count += 1
    if count in (len(chosen), len(rejected)):
        raise DataError("'chosen' and 'rejected' are the same conversation, or one is the beginning of the other")
    if count == 0:
        raise DataError("column 'prompt' is missing, and 'chosen' and 'rejected' have no common beginning")
    return chosen[:count]


def _without_prompt(side: Content, prompt: Content) -> Content:
    """Return only the completion, if the conversation repeats the prompt."""
    if isinstance(side, str):
        return side
    start: Sequence[Mapping[str, Any]] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    repeats = len(side) > len(start) and [dict(one) for one in side[: len(start)]] == [dict(one) for one in start]
    return side[len(start) :] if repeats else side


def _listed(row: Row, column: str) -> list[Any]:
    value = columns.required(row, column)
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence) or not value:
        raise DataError(f"column '{column}' must be a list with an entry for each completion, not {value!r:.60}")
    return list(value)


def _number(value: Any, column: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"column '{column}' must contain numbers, not {value!r:.60}")
    return float(value)
