"""Starts replicas for the generator suite, sends requests, and computes the expected completions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch
from pydantic import BaseModel
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
from chatlearn_testing.loop_watch import LoopWatch
from chatlearn_testing.model_directory import copy_with_weights, manifest_of, perturbed, read_checkpoint
from chatlearn_testing.reused_memory import ReusedMemoryLoader
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, ReferenceLoader
from chatlearn_testing.suites.model_suite import ModelSuite

T = TypeVar("T")
ABSOLUTE = 1e-4
"""Maximum absolute error of a float32 logprob, nats (invariant 3 of the design)."""
NUM_TOKENS = 12
LONG = 96
"""Length of completions that tests interrupt, tokens."""
MODEL_LENGTH = 128
FEW_TOKENS = 26
"""Token ids below this are in the vocabulary of every model that the suite runs with."""
PROMPTS = ((5, 9, 3), (17, 2, 30, 11, 8), (4,), (21, 21, 6, 13, 19, 7, 25))
TURNS = 50
"""Turns of the event loop that tests wait; a generator that ignores ``pause`` samples within them."""
TURN_S = 0.001
"""Length of a turn, seconds."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a byte-level tokenizer makes of a part of a character."""


@dataclass(slots=True, frozen=True)
class SpanningStop:
    """A stop string that begins in one token of a greedy completion and ends in the next."""

    prompt: tuple[int, ...]
    text: str
    whole: Completion
    """Without the stop string."""
    shorter: Completion
    """The first ``count - 1`` tokens."""

    @property
    def count(self) -> int:
        """Number of tokens up to the end of the stop string."""
        return len(self.shorter.token_ids) + 1


class Replica:
    """A generator and the event loop that runs its coroutines."""

    def __init__(self, generator: Generator, patience_s: float) -> None:
        self.generator = generator
        self._patience_s = patience_s
        self.loop = LoopWatch()
        self._runner = asyncio.Runner(loop_factory=self.loop.new_loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; raises ``TimeoutError`` after ``patience_s``."""
        return self._runner.run(asyncio.wait_for(work, self._patience_s))

    def ask(self, *requests: GenerateRequest) -> list[Completion]:
        """Submit requests together; returns their completions in order."""

        async def together() -> list[Completion]:
            return list(await asyncio.gather(*(self.generator.generate(request) for request in requests)))

        return self.run(together())

    def sync(self, tensors: Mapping[str, Tensor], version: int, manifest: WeightManifest | None = None) -> int:
        """Load whole tensors through channel ``tensors``, from memory that is overwritten after each call; returns the
        version that ``finish`` confirms.
        """

        async def load() -> int:
            loader = ReusedMemoryLoader(self.generator.loader)
            offered = manifest or manifest_of(tensors, loader.expected_manifest().aliases)
            await loader.begin(version, offered)
            await loader.load_tensors(iter(tensors.items()))
            return await loader.finish()

        return self.run(load())

    def close(self) -> None:
        """Close the generator and then its event loop, on which the generator may still finish work."""
        self.generator.close()
        self._runner.close()


class GeneratorFixtures(ModelSuite, ConformanceSuite):
    """Fixtures: ``replica`` keeps the model directory's weights, ``synced`` loads others, ``start`` starts replicas."""

    settable: ClassVar[frozenset[str]] = frozenset({"engine_arguments"})
    shares_backends: ClassVar[bool] = True
    engine_arguments: ClassVar[Mapping[str, Any]] = {}
    """Engine-native arguments, as in ``roles.generator.engine`` of a configuration."""

    @classmethod
    def build_generator(
        cls,
        directory: Path,
        engine_arguments: Mapping[str, Any] | None = None,
        options: BaseModel | None = None,
    ) -> Generator:
        """Build a generator of a model directory without setting it up; None: the suite's engine arguments, options."""
        arguments = cls.engine_arguments if engine_arguments is None else engine_arguments
        chosen = cls.make_options(dtype="float32") if options is None else options
        source = ModelSource(str(directory), str(directory), max_length=MODEL_LENGTH)
        context = RoleContext("generator", source, device=cls.device, engine_arguments=dict(arguments))
        generator: Generator = cls.build()(chosen, context)
        return generator

    @classmethod
    def start_replica(cls, directory: Path) -> Replica:
        """Build a replica of a model directory and set it up."""
        generator = cls.build_generator(directory)
        generator.setup()
        return Replica(generator, cls.patience_s)

    @pytest.fixture(scope="class")
    @classmethod
    def replica(cls, model_directory: Path) -> Iterator[Replica]:
        """A replica shared by the tests that do not change weights."""
        replica = cls.start_replica(model_directory)
        yield replica
        replica.close()

    @pytest.fixture(scope="class")
    @classmethod
    def synced(cls, model_directory: Path) -> Iterator[Replica]:
        """A replica shared by the tests that load weights; each test leaves it with complete weights."""
        replica = cls.start_replica(model_directory)
        yield replica
        replica.close()

    @pytest.fixture(scope="class")
    @classmethod
    def tensors(cls, model_directory: Path) -> dict[str, Tensor]:
        """The model directory's weights."""
        return read_checkpoint(model_directory)

    @pytest.fixture(scope="class")
    @classmethod
    def new_model(
        cls, tmp_path_factory: pytest.TempPathFactory, model_directory: Path, tensors: Mapping[str, Tensor]
    ) -> Path:
        """The same model with other weights."""
        target = tmp_path_factory.mktemp("conformance") / "new"
        return copy_with_weights(model_directory, perturbed(tensors, seed=1), target)

    @pytest.fixture(scope="class")
    @classmethod
    def new_reference(cls, load_plain: ReferenceLoader, new_model: Path) -> torch.nn.Module:
        """The new model loaded as a plain module."""
        return load_plain(new_model)

    @pytest.fixture
    def start(self, model_directory: Path) -> Iterator[Callable[[], Replica]]:
        """A function that starts a replica, for tests that kill or close it."""
        made: list[Replica] = []

        def make() -> Replica:
            made.append(self.start_replica(model_directory))
            return made[-1]

        yield make
        for replica in made:
            replica.close()


def ask(name: str, prompt: Sequence[int] = PROMPTS[0], **fields: Any) -> GenerateRequest:
    """Build a greedy request of ``NUM_TOKENS`` tokens; ``fields`` override those of the request or its sampling."""
    own = {key: fields.pop(key) for key in ("resume_from", "timeout_s", "group_id") if key in fields}
    sampling = SamplingParams(**({"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True} | fields))
    return GenerateRequest(name, np.array(prompt, dtype=np.int64), sampling, **own)


def ask_score(name: str, prompt: Sequence[int], token_ids: Sequence[int], **fields: Any) -> GenerateRequest:
    """Build a request for the logprobs of given tokens; ``fields`` as in ``ask``."""
    request = ask(name, prompt, **({"max_tokens": len(token_ids)} | fields))
    return replace(request, forced_ids=np.array(token_ids, dtype=np.int64))


class HalfWay:
    """Opens a request and waits until it has some of its tokens: as ``on_tokens`` tells, or by trying.

    Without streaming, nothing tells how far a request is; the wait is then too short or too long at first, and each
    further attempt is nearer.
    """

    def __init__(self, replica: Replica, streaming: bool, wanted: int) -> None:
        self._generator = replica.generator
        self._streaming = streaming
        self._wanted = wanted
        self._shortest, self._longest = 0.0, 0.0
        self._wait = 0.0
        self.told: list[int] = []

    async def open(self, request: GenerateRequest) -> asyncio.Task[Completion]:
        """Submit a request; returns when it has some tokens, or is done."""
        self.told = []
        reached = asyncio.Event()

        def on_tokens(start: int, tokens: list[int]) -> None:
            self.told.extend(tokens)
            if len(self.told) >= self._wanted:
                reached.set()

        task = asyncio.ensure_future(self._generator.generate(request, on_tokens if self._streaming else None))
        if self._streaming:
            waiting = asyncio.ensure_future(reached.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            return task
        turns = int(self._wait)
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.sleep(TURN_S * max(0, turns - TURNS) / 4)
        return task

    def learn(self, count: int) -> None:
        """Take the number of tokens that the request had into account."""
        if count:
            self._longest = self._wait
        else:
            self._shortest = self._wait
        self._wait = (self._shortest + self._longest) / 2 if self._longest else max(1.0, 2 * self._wait)


async def idle() -> None:
    """Give a generator the time to sample."""
    for _ in range(TURNS):
        await asyncio.sleep(TURN_S)


def text_by_length(replica: Replica, prompt: tuple[int, ...]) -> list[Completion]:
    """Return greedy completions of 1, 2, ..., ``NUM_TOKENS`` tokens; their texts show which text each token adds."""
    return replica.ask(*(ask(f"text-{count}", prompt, max_tokens=count) for count in range(1, NUM_TOKENS + 1)))


def spanning_stop(replica: Replica) -> SpanningStop:
    """Find a stop string over two tokens, which first occurs there, in greedy completions of the suite's prompts."""
    for prompt in PROMPTS:
        completions = text_by_length(replica, prompt)
        for shorter, longer in reversed(list(pairwise(completions[:-1]))):
            before, text = shorter.text, longer.text
            stop = text[len(before) - 1 : len(before) + 1]
            is_whole = text.startswith(before) and INCOMPLETE not in text and not stop.isspace()
            if before and is_whole and len(stop) == 2 and stop not in before:
                return SpanningStop(prompt, stop, completions[-1], shorter)
    raise AssertionError("the text of no greedy completion of the suite's prompts grows from token to token")


def plain_logits(reference: torch.nn.Module, prompt: Sequence[int], token_ids: Sequence[int]) -> Tensor:
    """Compute the [C, V] logits of the completion tokens with one plain forward."""
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([*prompt, *token_ids]))
    return logits[len(prompt) - 1 : -1]


def plain_greedy(reference: torch.nn.Module, prompt: Sequence[int], count: int = NUM_TOKENS) -> list[int]:
    """Generate ``count`` tokens greedily with plain forwards."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(reference(torch.tensor(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


def plain_logprobs(
    reference: torch.nn.Module, prompt: Sequence[int], completion: Completion, basis: LogprobBasis
) -> Tensor:
    """Compute the [C] logprobs of a completion's tokens under ``basis`` with a plain forward."""
    tokens = completion.token_ids.tolist()
    distribution = basis_logprobs(plain_logits(reference, prompt, tokens), basis)
    return distribution.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def assert_completion(
    reference: torch.nn.Module, request: GenerateRequest, completion: Completion, version: int | None = 0
) -> None:
    """Check the invariants of a completion: lengths agree, version spans cover it, logprobs match the stated basis.

    Args:
        version: the policy version of every token; None: any.
    """
    count = len(completion.token_ids)
    assert completion.request_id == request.id, f"request {request.id!r} got completion {completion.request_id!r}"
    assert count <= request.sampling.max_tokens, f"{count} tokens, max_tokens {request.sampling.max_tokens}"
    assert len(completion.logprobs) == count, f"{len(completion.logprobs)} logprobs for {count} tokens"
    assert completion.basis in (RAW_BASIS, request.sampling.basis), (
        f"states the basis {completion.basis}, expected raw or {request.sampling.basis}"
    )
    assert completion.sampling == request.sampling, f"states the sampling {completion.sampling}"
    for name, array, dtype in (
        ("token_ids", completion.token_ids, np.int64),
        ("logprobs", completion.logprobs, np.float32),
        ("raw_logprobs", completion.raw_logprobs, np.float32),
    ):
        assert array is None or array.dtype == dtype, f"{name} is {array.dtype}, not {np.dtype(dtype)}"
    edges = [0, *(span.stop for span in completion.version_spans)]
    assert [span.start for span in completion.version_spans] == edges[:-1], "version spans leave a gap or overlap"
    assert edges[-1] == count, f"version spans cover {edges[-1]} of {count} tokens"
    if version is not None:
        assert {span.version for span in completion.version_spans} <= {version}, (
            f"the replica serves version {version}, but the completion has {completion.version_spans}"
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
    """Check that [C] logprobs differ by at most ``ABSOLUTE``."""
    apart = (torch.as_tensor(found).double() - expected).abs()
    assert float(apart.max()) <= ABSOLUTE, (
        f"{completion.request_id}: token {int(apart.argmax())} has logprob {float(found[int(apart.argmax())])}, a plain"
        f" forward gives {float(expected[int(apart.argmax())])} (stated basis: {completion.basis})"
    )
