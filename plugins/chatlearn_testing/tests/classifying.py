"""A generator that serves a bigram model as a classifier, right and with one fault each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols.generator import OnTokens
from chatlearn_core.types import Completion, GenerateRequest
from chatlearn_testing.fakes.bigram import TRANSITION, UNIGRAM, read_bigram_tensors
from chatlearn_testing.fakes.generator import FakeGenerator
from chatlearn_testing.fakes.options import FakeGeneratorOptions


class ClassifyingOptions(FakeGeneratorOptions):
    classifies: bool = False


class BigramScore(torch.nn.Module):
    """``forward(token_ids [T]) -> scores [1]``: the mean bias of the tokens plus a matrix entry of the last two."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.tensors = read_bigram_tensors(directory)

    def forward(self, token_ids: Tensor) -> Tensor:
        first = token_ids[-2] if len(token_ids) > 1 else token_ids[-1]
        return (self.tensors[UNIGRAM][token_ids].mean() + self.tensors[TRANSITION][first, token_ids[-1]])[None]


@dataclass(slots=True, eq=False)
class _Asked:
    request: GenerateRequest
    score: float


class Classifying(FakeGenerator):
    """Serves a classifier if its options say so."""

    options: ClassifyingOptions

    def setup(self) -> None:
        super().setup()
        self._score = BigramScore(self._directory)

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        if not self.options.classifies:
            return await super().generate(request, on_tokens)
        if not request.classify:
            raise BackendError(f"{self.name}, request {request.id!r}: this generator classifies and samples nothing")
        if len(request.prompt_ids) > self._max_length:
            raise BackendError(f"{self.name}, request {request.id!r}: it is longer than {self._max_length} tokens")
        return self.answer(_Asked(request, float(self._score(torch.from_numpy(request.prompt_ids)))))

    def answer(self, asked: _Asked) -> Completion:
        nothing = np.zeros(0, np.float32)
        sampling = asked.request.sampling
        return Completion(
            asked.request.id, nothing.astype(np.int64), nothing, sampling.basis, "stop", sampling, (), score=asked.score
        )


class Sigmoid(Classifying):
    def answer(self, asked: _Asked) -> Completion:
        return super().answer(replace(asked, score=1 / (1 + np.exp(-asked.score))))


class OfThePromptBefore(Classifying):
    _before: float | None = None

    def answer(self, asked: _Asked) -> Completion:
        score, self._before = asked.score if self._before is None else self._before, asked.score
        return super().answer(replace(asked, score=score))


class OnlyFirstTokens(Classifying):
    def answer(self, asked: _Asked) -> Completion:
        first = asked.request.prompt_ids[:60]
        return super().answer(replace(asked, score=float(self._score(torch.from_numpy(first)))))


class WithToken(Classifying):
    def answer(self, asked: _Asked) -> Completion:
        found = super().answer(asked)
        return replace(found, token_ids=np.array([1]), logprobs=np.zeros(1, np.float32))


class WithReasonLength(Classifying):
    def answer(self, asked: _Asked) -> Completion:
        return replace(super().answer(asked), finish_reason="length")


class WithoutScore(Classifying):
    def answer(self, asked: _Asked) -> Completion:
        return replace(super().answer(asked), score=None)


class AlwaysClassifies(Classifying):
    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        if self.options.classifies:
            request = replace(request, classify=True)
        return await super().generate(request, on_tokens)


class TakesLongPrompts(Classifying):
    def setup(self) -> None:
        super().setup()
        self._max_length *= 2


class SamplesWhenAskedToClassify(Classifying):
    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        if not self.options.classifies:
            request = replace(request, classify=False)
        return await super().generate(request, on_tokens)
