"""How the generator suite starts replicas, asks them, and computes what they should have answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from chatlearn_core.protocols import Generator, ModelSource, RoleContext
from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    GenerateRequest,
    LogprobBasis,
    SamplingParams,
    WeightManifest,
)
from chatlearn_testing.fakes.sampling import basis_logprobs
from chatlearn_testing.model_directory import manifest_of
from chatlearn_testing.reused_memory import ReusedMemoryLoader
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.model_suite import ModelSuite

T = TypeVar("T")
ABSOLUTE = 1e-4
"""Of a logprob, nats, float32 (invariant 3 of the design)."""
NUM_TOKENS = 12
LONG = 96
"""Tokens of a completion that is to be interrupted."""
MODEL_LENGTH = 128
PROMPTS = ((5, 9, 3), (17, 2, 30, 11, 8), (4,), (21, 21, 6, 13, 19, 7, 25))


class Replica:
    """A generator with the event loop that its coroutines run on."""

    def __init__(self, generator: Generator, patience_s: float) -> None:
        self.generator = generator
        self._patience_s = patience_s
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end; hanging is an error."""
        return self._runner.run(asyncio.wait_for(work, self._patience_s))

    def ask(self, *requests: GenerateRequest) -> list[Completion]:
        """Completions of requests that are submitted together."""

        async def together() -> list[Completion]:
            return list(await asyncio.gather(*(self.generator.generate(request) for request in requests)))

        return self.run(together())

    def sync(self, tensors: Mapping[str, Tensor], version: int, manifest: WeightManifest | None = None) -> int:
        """Load whole tensors as a transport of channel ``tensors`` does, whose memory does not outlive a call."""

        async def load() -> int:
            loader = ReusedMemoryLoader(self.generator.loader)
            offered = manifest or manifest_of(tensors, loader.expected_manifest().aliases)
            await loader.begin(version, offered)
            await loader.load_tensors(iter(tensors.items()))
            return await loader.finish()

        return self.run(load())

    def close(self) -> None:
        """Close both. The loop goes last: the generator may finish its work on it."""
        self.generator.close()
        self._runner.close()


class GeneratorFixtures(ModelSuite, ConformanceSuite):
    """Replicas: ``replica`` keeps the model directory's weights, ``synced`` gets others, ``start`` makes new ones."""

    settable: ClassVar[frozenset[str]] = frozenset({"engine_arguments"})
    engine_arguments: ClassVar[Mapping[str, Any]] = {}
    """Engine-native arguments, as under ``roles.generator.engine``."""

    @classmethod
    def start_replica(cls, directory: Path) -> Replica:
        """A replica of a model directory, set up."""
        source = ModelSource(str(directory), str(directory), max_length=MODEL_LENGTH)
        context = RoleContext("generator", source, device=cls.device, engine_arguments=dict(cls.engine_arguments))
        generator: Generator = cls.build()(cls.make_options(dtype="float32"), context)
        generator.setup()
        return Replica(generator, cls.patience_s)

    @pytest.fixture(scope="class")
    @classmethod
    def replica(cls, model_directory: Path) -> Iterator[Replica]:
        """Shared by the tests that do not change weights."""
        replica = cls.start_replica(model_directory)
        yield replica
        replica.close()

    @pytest.fixture(scope="class")
    @classmethod
    def synced(cls, model_directory: Path) -> Iterator[Replica]:
        """Shared by the tests that load weights; they end with whole ones."""
        replica = cls.start_replica(model_directory)
        yield replica
        replica.close()

    @pytest.fixture
    def start(self, model_directory: Path) -> Iterator[Callable[[], Replica]]:
        """For tests that end a replica's life."""
        made: list[Replica] = []

        def make() -> Replica:
            made.append(self.start_replica(model_directory))
            return made[-1]

        yield make
        for replica in made:
            replica.close()


def ask(name: str, prompt: Sequence[int] = PROMPTS[0], **fields: Any) -> GenerateRequest:
    """A request; sampling fields beside those of ``GenerateRequest``."""
    own = {key: fields.pop(key) for key in ("resume_from", "timeout_s", "group_id") if key in fields}
    sampling = SamplingParams(**({"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True} | fields))
    return GenerateRequest(name, np.array(prompt, dtype=np.int64), sampling, **own)


def ask_score(name: str, prompt: Sequence[int], token_ids: Sequence[int], **fields: Any) -> GenerateRequest:
    """A request for the logprobs of given tokens; fields as of ``ask``."""
    request = ask(name, prompt, **({"max_tokens": len(token_ids)} | fields))
    return replace(request, forced_ids=np.array(token_ids, dtype=np.int64))


def plain_logits(reference: torch.nn.Module, prompt: Sequence[int], token_ids: Sequence[int]) -> Tensor:
    """[C, V] logits that each completion token was drawn from, by one plain forward."""
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([*prompt, *token_ids]))
    return logits[len(prompt) - 1 : -1]


def plain_greedy(reference: torch.nn.Module, prompt: Sequence[int], count: int = NUM_TOKENS) -> list[int]:
    """The most likely token, ``count`` times, by plain forwards."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(reference(torch.tensor(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


def plain_logprobs(
    reference: torch.nn.Module, prompt: Sequence[int], completion: Completion, basis: LogprobBasis
) -> Tensor:
    """[C] logprobs of a completion's tokens under ``basis``."""
    tokens = completion.token_ids.tolist()
    distribution = basis_logprobs(plain_logits(reference, prompt, tokens), basis)
    return distribution.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def assert_completion(
    reference: torch.nn.Module, request: GenerateRequest, completion: Completion, version: int | None = 0
) -> None:
    """What holds for every completion: lengths agree, spans cover it, logprobs are what the basis says."""
    count = len(completion.token_ids)
    assert completion.request_id == request.id, f"answers {request.id!r} with {completion.request_id!r}"
    assert count <= request.sampling.max_tokens, f"{count} tokens, max_tokens {request.sampling.max_tokens}"
    assert len(completion.logprobs) == count, f"{len(completion.logprobs)} logprobs for {count} tokens"
    assert completion.basis in (RAW_BASIS, request.sampling.basis), (
        f"states the basis {completion.basis}; the request allows raw or {request.sampling.basis}"
    )
    edges = [0, *(span.stop for span in completion.version_spans)]
    assert [span.start for span in completion.version_spans] == edges[:-1], "version spans leave a gap or overlap"
    assert edges[-1] == count, f"version spans cover {edges[-1]} of {count} tokens"
    if version is not None:
        assert {span.version for span in completion.version_spans} <= {version}, (
            f"version {version} is served, the completion says {completion.version_spans}"
        )
    if count:
        prompt = request.prompt_ids.tolist()
        assert_logprobs(
            completion.logprobs, plain_logprobs(reference, prompt, completion, completion.basis), completion
        )
        if completion.raw_logprobs is not None:
            raw = plain_logprobs(reference, prompt, completion, RAW_BASIS)
            assert_logprobs(completion.raw_logprobs, raw, completion)


def assert_logprobs(found: Any, expected: Tensor, completion: Completion) -> None:
    """Equal up to float32 noise."""
    apart = (torch.as_tensor(found).double() - expected).abs()
    assert float(apart.max()) <= ABSOLUTE, (
        f"{completion.request_id}: token {int(apart.argmax())} has logprob {float(found[int(apart.argmax())])}, a plain"
        f" forward gives {float(expected[int(apart.argmax())])} (stated basis: {completion.basis})"
    )
