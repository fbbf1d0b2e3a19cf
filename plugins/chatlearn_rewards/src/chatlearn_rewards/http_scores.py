"""What the reward ``http`` sends and receives: samples as JSON, and their scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from chatlearn_core.exceptions import BackendError, DataError
from chatlearn_core.types import RewardResult, Sample
from chatlearn_rewards.http_options import HttpOptions
from chatlearn_rewards.question import conversation

_SHOWN = 80
"""Characters of a wrong value that an error shows."""


@dataclass(slots=True, frozen=True)
class Scored:
    """A sample's result as the server gave it, or why it cannot be used."""

    result: RewardResult
    more: Mapping[str, Any]
    """``steps``, if there are some: [end, reward] of each."""


class UnusableResponseError(BackendError):
    """A response is JSON, but gives no scores for the samples of its request."""


def sample_row(sample: Sample, options: HttpOptions, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A sample as an element of ``samples`` of a request.

    Args:
        messages: of its prompt (``PromptReader``).

    Raises:
        DataError: its row does not have a column that the options name.
    """
    prompt = sample.prompt
    row: dict[str, Any] = {
        "id": sample.id,
        "group_id": sample.group_id,
        "data_source": prompt.data_source,
        "prompt": conversation(messages),
        "messages": [dict(message) for message in prompt.messages],
        "completion": sample.text,
        "ground_truth": prompt.ground_truth,
    }
    if options.columns:
        missing = [name for name in options.columns if name not in prompt.columns]
        if missing:
            raise DataError(
                f"prompt {prompt.id!r} has no column {missing[0]!r} (option columns); it has "
                f"{', '.join(sorted(prompt.columns)) or 'none'}"
            )
        row["columns"] = {name: prompt.columns[name] for name in options.columns}
    if options.token_ids:
        row["completion_ids"] = np.asarray(sample.completion_ids).tolist()
    return row


def read_scores(response: Any, ids: Sequence[str]) -> list[Scored]:
    """The results of the samples ``ids``, in their order; a result that cannot be used is an error of its sample.

    Raises:
        UnusableResponseError: the response as a whole does not answer the request: it has no list ``results``, or not
            one result for each sample.
    """
    results = response.get("results") if isinstance(response, Mapping) else None
    if not isinstance(results, list):
        raise UnusableResponseError(f"the response has no list 'results', but is {response!r:.{_SHOWN}}")
    if len(results) != len(ids):
        raise UnusableResponseError(f"the response has {len(results)} results for {len(ids)} samples")
    by_id: dict[str, Mapping[str, Any]] = {}
    for result in results:
        found = result.get("id") if isinstance(result, Mapping) else None
        if not isinstance(found, str):
            raise UnusableResponseError(f"a result has no 'id', the id of its sample: {result!r:.{_SHOWN}}")
        if found in by_id:
            raise UnusableResponseError(f"the response has two results for sample {found!r}")
        by_id[found] = result
    if unknown := sorted(by_id.keys() - set(ids)):
        raise UnusableResponseError(f"the response has a result for {unknown[0]!r}, which was not asked for")
    return [_scored(by_id[one]) for one in ids]


def _scored(answer: Mapping[str, Any]) -> Scored:
    result, steps = _result(answer), answer.get("steps")
    if result.error is not None or steps is None:
        return Scored(result, {})
    if result.token_values is not None:
        return Scored(RewardResult(None, error="the server gives token_values and steps; a result may have one"), {})
    if not isinstance(steps, list) or not all(_is_step(step) for step in steps):
        problem = f"the server's steps are {steps!r:.{_SHOWN}}, not a list of [end, reward]"
        return Scored(RewardResult(None, error=problem), {})
    return Scored(result, {"steps": steps})


def _is_step(step: Any) -> bool:
    return isinstance(step, list) and len(step) == 2 and isinstance(step[0], int) and all(map(_is_number, step))


def _result(result: Mapping[str, Any]) -> RewardResult:
    if result.get("error") is not None:
        return RewardResult(None, error=f"the server says: {result['error']!s:.500}")
    score = result.get("score")
    if not _is_number(score):
        return RewardResult(None, error=f"the server's score is {score!r:.{_SHOWN}}, not a finite number")
    metrics = result.get("metrics") or {}
    if not isinstance(metrics, Mapping) or not all(_is_number(number) for number in metrics.values()):
        return RewardResult(None, error=f"the server's metrics are {metrics!r:.{_SHOWN}}, not finite numbers by name")
    answer = result.get("answer")
    if answer is not None and not isinstance(answer, str):
        return RewardResult(None, error=f"the server's answer is {answer!r:.{_SHOWN}}, not a text")
    values, tokens = result.get("token_values"), None
    if values is not None:
        if not isinstance(values, list) or not all(_is_number(number) for number in values):
            shown = f"{values!r:.{_SHOWN}}"
            return RewardResult(None, error=f"the server's token_values are {shown}, not a list of finite numbers")
        tokens = np.asarray(values, np.float32)
    components = {str(name): float(number) for name, number in metrics.items()}
    return RewardResult(float(score), components, tokens, answer=answer)


def _is_number(value: Any) -> TypeGuard[float]:
    """JSON's true and false are no numbers; Python's reader takes NaN and Infinity for numbers, which JSON lacks."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
