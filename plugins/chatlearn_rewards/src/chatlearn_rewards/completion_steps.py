"""Steps of a completion's text, and the tokens that they end with."""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from chatlearn_chat.token_ends import decoded_lengths
from chatlearn_core.exceptions import DataError
from chatlearn_core.types import RewardResult, Sample


def split_steps(text: str, delimiter: str) -> list[tuple[int, int]]:
    """(start, stop) of each step in ``text``, characters; a step has the delimiter that ends it.

    What is blank between two delimiters is no step of its own, but part of the step before it (or behind it, at the
    beginning). Without a delimiter the whole text is one step; a blank text has none.
    """
    spans: list[tuple[int, int]] = []
    start = at = 0
    while at < len(text):
        found = text.find(delimiter, at)
        stop = len(text) if found < 0 else found + len(delimiter)
        if text[start:stop].replace(delimiter, "").strip():
            spans.append((start, stop))
            start = stop
        elif spans:
            spans[-1] = (spans[-1][0], stop)
            start = stop
        at = stop
    return spans


class StepTokens:
    """Finds the tokens with which steps of a completion's text end.

    Args:
        load_tokenizer: ``RoleContext.load_tokenizer``; called when it is first needed.
        what: who asks, for errors.
    """

    def __init__(self, load_tokenizer: Callable[[], Any] | None, what: str) -> None:
        self._load_tokenizer = load_tokenizer
        self._what = what
        self._tokenizer: Any = None
        self._lock = threading.Lock()  # fast tokenizers refuse to be used by two threads at a time

    def load(self) -> None:
        """Load the tokenizer.

        Raises:
            DataError: the runtime gives none.
            ModelError: the run's model has none.
        """
        with self._lock:
            if self._tokenizer is None:
                if self._load_tokenizer is None:
                    raise DataError(f"{self._what} needs the tokenizer of the run's model, and its runtime gives none")
                self._tokenizer = self._load_tokenizer()

    def result(
        self, sample: Sample, steps: Sequence[tuple[int, float]], value: float = 0.0, **more: Any
    ) -> RewardResult:
        """A result with rewards of steps.

        Steps that end in the same token are one step with the mean of their rewards. A step that ends with the text
        ends with the last token, which may be one that ends the turn.

        Args:
            steps: (stop, reward) of each step; stop is a number of characters of ``sample.text``, ascending, from 1.
            value: the reward of the completion itself.
            more: other fields of ``RewardResult``.

        Raises:
            DataError: a stop is not in the text, or the text is not what the tokens decode to.
        """
        stops = [stop for stop, _ in steps]
        if stops != sorted(set(stops)) or (stops and not 1 <= stops[0] <= stops[-1] <= len(sample.text)):
            raise DataError(
                f"steps end at {stops!r:.80}; they must ascend from 1 to the {len(sample.text)} characters of the "
                "completion"
            )
        rewards: dict[int, list[float]] = {}
        for end, (_, reward) in zip(self.ends(sample, stops), steps, strict=True):
            rewards.setdefault(end, []).append(reward)
        values = np.zeros(sample.num_completion_tokens, np.float32)
        for end, of_token in rewards.items():
            values[end] = sum(of_token) / len(of_token)
        return RewardResult(value, token_values=values, step_ends=np.array(sorted(rewards), np.int64), **more)

    async def with_steps(self, result: RewardResult, sample: Sample, answer: Mapping[str, Any]) -> RewardResult:
        """The result with the rewards of steps in ``answer["steps"]``, pairs (stop, reward); an error if they cannot be
        placed. Without steps the result itself.
        """
        steps = answer.get("steps")
        if steps is None or result.value is None:
            return result
        more = {"components": result.components, "answer": result.answer}
        pairs = [(int(stop), float(reward)) for stop, reward in steps]
        try:
            return await asyncio.to_thread(self.result, sample, pairs, result.value, **more)
        except DataError as error:
            return RewardResult(None, error=str(error))

    def ends(self, sample: Sample, stops: Sequence[int]) -> list[int]:
        """For each stop the position behind the prompt of the token with which the text up to it is complete.

        Raises:
            DataError: the text is not what the tokens decode to.
        """
        if not stops:
            return []
        self.load()
        ends: list[int] = []
        before, ids = 0, np.asarray(sample.token_ids)
        for turn in sample.turns:
            text = str(turn.text)
            inside = [stop - before for stop in stops if before < stop <= before + len(text)]
            if inside:
                with self._lock:
                    reached = _reached(self._tokenizer, ids[turn.start : turn.stop].tolist(), text, sample.id)
                last = len(reached) - 1
                offset = turn.start - sample.num_prompt_tokens
                ends += [
                    offset + (last if stop == len(text) else min(bisect_left(reached, stop), last)) for stop in inside
                ]
            before += len(text)
        return ends


def _reached(tokenizer: Any, ids: Sequence[int], text: str, sample_id: str) -> list[int]:
    """[C] how many characters of ``text`` are complete with each token."""
    for skips in (True, False):
        decoded, reached = decoded_lengths(tokenizer, ids, skip_special_tokens=skips)
        if decoded.startswith(text):  # a stop string is cut from the text, and stays in the tokens
            return reached
    raise DataError(
        f"sample {sample_id!r}: its text {text[:80]!r} is not what its tokens decode to ({decoded[:80]!r}), so that "
        "steps of the text cannot be found in the tokens"
    )
