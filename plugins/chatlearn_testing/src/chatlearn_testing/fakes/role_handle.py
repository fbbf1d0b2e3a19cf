"""A fake ``RoleHandle`` for rewards that call other roles; the test scripts its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from chatlearn_core.protocols.prompt_renderer import RenderedDemonstration, RenderedPrompt
from chatlearn_core.types import (
    Completion,
    Floats,
    OutputRequest,
    Outputs,
    SamplingParams,
    TokenIds,
    TrainBatch,
    VersionSpan,
)


class CharacterRenderer:
    """Conversations as characters: ``[user]question[assistant]``; ids are code points."""

    control_tokens = "text"
    end_of_turn_id = None

    def spelled_control_tokens(self, *texts: Any) -> tuple[str, ...]:
        return ()

    def prompt(self, prompt: str | Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> RenderedPrompt:
        messages = () if isinstance(prompt, str) else tuple(prompt)
        text = prompt if isinstance(prompt, str) else "".join(f"[{m['role']}]{m['content']}" for m in messages)
        text += "[assistant]"
        return RenderedPrompt(text, codes(text), messages)

    def demonstration(self, prompt: Any, completion: Any, **settings: Any) -> RenderedDemonstration:
        ids = codes(completion)
        return RenderedDemonstration(self.prompt(prompt), ids, np.ones(len(ids), np.bool_))


class CharacterCodes:
    """The tokenizer of ``CharacterRenderer``."""

    chat_template = "[role]content"

    def encode(self, text: str, **settings: Any) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return text_of(np.asarray(token_ids))


class ScriptedHandle:
    """Implements ``RoleHandle``.

    Args:
        answer: for a generator: ``(prompt text, sampling) -> text``; its exceptions reach the caller.
        logprobs: for a generator that scores: ``(prompt text, continuation text) -> [C]``.
        scores: for a trainer: ``(token ids of a sequence) -> number``.
        weights_change: whether the role's weights change during the run.
        classify: for a generator that serves a sequence classifier: ``(token ids) -> number``.
    """

    role = "scripted"
    model_path = "scripted model"
    max_length = 20_000
    tokenizer = CharacterCodes()
    renderer = CharacterRenderer()

    def __init__(
        self,
        answer: Callable[[str, SamplingParams], str] | None = None,
        *,
        logprobs: Callable[[str, str], Sequence[float]] | None = None,
        scores: Callable[[list[int]], float] | None = None,
        weights_change: bool = False,
        classify: Callable[[list[int]], float] | None = None,
    ) -> None:
        self.kind = "generator" if scores is None else "trainer"
        self.weights_change = weights_change
        self.asked: list[tuple[str, SamplingParams]] = []
        self.batches: list[tuple[str, ...]] = []
        """Sample ids of every computed batch."""
        self.classifies = classify is not None
        self._answer, self._logprobs, self._scores, self._classify = answer, logprobs, scores, classify

    async def generate(
        self, token_ids: TokenIds, sampling: SamplingParams, *, request_id: str, group_id: str = ""
    ) -> Completion:
        assert self._answer is not None, "the test must pass answer"
        prompt = text_of(token_ids)
        self.asked.append((prompt, sampling))
        ids = codes(text := self._answer(prompt, sampling))
        spans = (VersionSpan(0, len(ids), 0),) if len(ids) else ()
        logprobs = np.full(len(ids), -1.0, np.float32)
        return Completion(request_id, ids, logprobs, sampling.basis, "stop", sampling, spans, text=text)

    async def score(
        self,
        token_ids: TokenIds,
        continuation_ids: TokenIds,
        *,
        request_id: str,
        group_id: str = "",
        temperature: float = 1.0,
    ) -> Floats:
        assert self._logprobs is not None, "the test must pass logprobs"
        return np.asarray(self._logprobs(text_of(token_ids), text_of(continuation_ids)), np.float32)

    async def classify(self, token_ids: TokenIds, *, request_id: str, group_id: str = "") -> float:
        assert self._classify is not None, "the test must pass classify"
        return self._classify([int(token) for token in token_ids])

    async def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        assert self._scores is not None, "the test must pass scores"
        self.batches.append(batch.sample_ids)
        rows = torch.split(batch.token_ids, batch.lengths)
        return {"scores": torch.tensor([self._scores(row.tolist()) for row in rows])}


def codes(text: str) -> TokenIds:
    """[T] code points."""
    return np.array([ord(character) for character in text], np.int64)


def text_of(token_ids: TokenIds) -> str:
    """Return the text of code points."""
    return "".join(map(chr, np.asarray(token_ids).tolist()))
