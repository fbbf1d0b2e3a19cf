"""A generator of the bigram model: one coroutine per request, which samples one token per turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ConfigError, WeightSyncError
from chatlearn_core.protocols import MemoryPart, RoleContext
from chatlearn_core.protocols.generator import OnTokens
from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    FinishReason,
    GenerateRequest,
    ReplicaState,
    VersionSpan,
    WeightManifest,
    WeightShard,
)
from chatlearn_testing.fakes.bigram import (
    END_OF_SEQUENCE,
    MAX_LENGTH,
    TRANSITION,
    UNIGRAM,
    WEIGHTS_FILE,
    bigram_logits,
    bigram_manifest,
    read_bigram_tensors,
)
from chatlearn_testing.fakes.engine_arguments import refuse_engine_arguments
from chatlearn_testing.fakes.options import FakeGeneratorOptions
from chatlearn_testing.fakes.sampling import basis_logprobs, draw, uniform


@dataclass(slots=True, eq=False)
class _Running:
    """One request and the tokens sampled for it."""

    request: GenerateRequest
    on_tokens: OnTokens | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    aborted: bool = False

    def completion(self, reason: FinishReason) -> Completion:
        spans: list[VersionSpan] = []
        for index, version in enumerate(self.versions):
            if spans and spans[-1].version == version:
                spans[-1] = replace(spans[-1], stop=index + 1)
            else:
                spans.append(VersionSpan(index, index + 1, version))
        return Completion(
            request_id=self.request.id,
            token_ids=np.array(self.tokens, dtype=np.int64),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            basis=self.request.sampling.basis,
            finish_reason=reason,
            sampling=self.request.sampling,
            version_spans=tuple(spans),
            raw_logprobs=np.array(self.raw_logprobs, dtype=np.float32),
            text=fake_text(self.tokens),
        )


class FakeGenerator:
    """Implements ``chatlearn_core.protocols.Generator``."""

    def __init__(self, options: FakeGeneratorOptions, context: RoleContext) -> None:
        if context.model is None:
            raise ConfigError(f"roles.{context.role}: a generator needs a model; set its model.path")
        refuse_engine_arguments(context)
        self.options = options
        self.context = context
        self._directory = Path(context.model.path)
        self._max_length = context.model.max_length or MAX_LENGTH
        self._weights: dict[str, Tensor] = {}
        self._running: list[_Running] = []
        self._state: ReplicaState = "loading"
        self._problem: str | None = "not set up"
        self._version = 0
        self._paused = False
        self._away: set[MemoryPart] = set()
        self._aside: dict[str, Tensor] = {}
        """Offloaded weights; the model then holds empty tensors in their place."""

    def setup(self) -> None:
        self._weights = read_bigram_tensors(self._directory)
        self._loader = FakeWeightLoader(self, bigram_manifest(self._weights))
        self._state, self._problem = "serving", None

    def health(self) -> str | None:
        return self._problem

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """See ``Lifecycle``. The model has no KV cache, but sampling still requires that it is not offloaded."""
        if "weights" in parts and "weights" not in self._away:
            self._aside = self._weights
            self._weights = {name: tensor.new_empty(0) for name, tensor in self._weights.items()}
        self._away |= set(parts) & {"weights", "kv_cache"}

    def onload(self, parts: Collection[MemoryPart]) -> None:
        if "weights" in parts and "weights" in self._away:
            self._weights, self._aside = self._aside, {}
        self._away -= set(parts)

    def live_bytes(self, part: MemoryPart) -> int:
        return sum(tensor.nbytes for tensor in self._weights.values()) if part == "weights" else 0

    @property
    def weights_are_offloaded(self) -> bool:
        """Whether the weights are offloaded; for the loader."""
        return "weights" in self._away

    def close(self) -> None:
        self.die("the generator was closed")

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def state(self) -> ReplicaState:
        return self._state

    @property
    def loader(self) -> FakeWeightLoader:
        return self._loader

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """See the protocol. Requests to a paused replica wait."""
        self._check(request)
        run = _Running(request, on_tokens)
        if (prior := request.resume_from) is not None:
            raw = prior.raw_logprobs if prior.raw_logprobs is not None else prior.logprobs
            run.tokens, run.logprobs = prior.token_ids.tolist(), prior.logprobs.tolist()
            run.raw_logprobs = raw.tolist()
            run.versions = [span.version for span in prior.version_spans for _ in range(span.start, span.stop)]
        self._running.append(run)
        try:
            async with asyncio.timeout(request.timeout_s):
                return await self._sample(run)
        except TimeoutError as error:
            raise BackendTimeoutError(
                f"{self.name}: request {request.id!r} had no answer within {request.timeout_s} s"
            ) from error
        finally:
            self._running.remove(run)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        for run in self._running:
            if request_ids is None or run.request.id in request_ids:
                run.aborted = True

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False

    @property
    def name(self) -> str:
        """Role and replica, for messages."""
        return f"generator role {self.context.role!r} replica {self.context.replica} (fake)"

    def stop_serving(self) -> None:
        """For the loader: no token is sampled until ``serve``."""
        self._state, self._problem = "loading", "weights are being loaded"

    def serve(self, version: int) -> None:
        """For the loader: sample from the loaded weights."""
        self._version, self._state, self._problem = version, "serving", None

    def die(self, reason: str) -> None:
        """For the loader: fail every open request and refuse new ones."""
        self._state, self._problem = "dead", reason

    def live_weights(self) -> dict[str, Tensor]:
        """For the loader: the tensors that are sampled from."""
        return self._weights

    async def _sample(self, run: _Running) -> Completion:
        sampling, forced_ids = run.request.sampling, run.request.forced_ids
        while len(run.tokens) < sampling.max_tokens:
            # One turn of the event loop a token, so that other requests, an abort or a pause come in between.
            await asyncio.sleep(self.options.seconds_per_token)
            if run.aborted:
                return run.completion("abort")
            if self._state == "dead":
                raise BackendError(f"{self.name}: request {run.request.id!r} failed: {self._problem}")
            if self._paused or self._state == "loading":
                continue
            if forced_ids is not None:
                for forced in forced_ids.tolist():
                    self._append_token(run, forced)
                return run.completion("stop")
            token = self._append_token(run)
            if run.on_tokens is not None:
                run.on_tokens(len(run.tokens) - 1, [token])
            if token in sampling.stop_token_ids or (token == END_OF_SEQUENCE and not sampling.ignore_eos):
                return run.completion("stop")
            if any(stop in fake_text(run.tokens) for stop in sampling.stop):
                return run.completion("stop")
        return run.completion("length")

    def _append_token(self, run: _Running, forced: int | None = None) -> int:
        """Sample a token, or take the given one, and record its logprobs."""
        sampling = run.request.sampling
        last = run.tokens[-1] if run.tokens else int(run.request.prompt_ids[-1])
        logits = bigram_logits(self._weights[TRANSITION], self._weights[UNIGRAM], torch.tensor(last))
        raw, processed = basis_logprobs(logits, RAW_BASIS), basis_logprobs(logits, sampling.basis)
        if forced is not None:
            token = forced
        elif sampling.temperature == 0.0:
            token = int(raw.argmax())
        else:
            token = draw(processed, uniform(sampling.seed, len(run.tokens)))
        run.tokens.append(token)
        run.logprobs.append(float(processed[token]))
        run.raw_logprobs.append(float(raw[token]))
        run.versions.append(self._version)
        return token

    def _check(self, request: GenerateRequest) -> None:
        where = f"{self.name}, request {request.id!r}"
        if self._state == "dead" or (self._state == "loading" and not self._paused):
            raise BackendError(f"{where}: the replica is {self._state} ({self._problem})")
        if self._away and not self._paused:
            raise BackendError(f"{where}: {', '.join(sorted(self._away))} is offloaded; onload it first")
        if request.classify:
            raise BackendError(f"{where}: it requests the score of a classifier; this is a language model")
        if not len(request.prompt_ids):
            raise BackendError(f"{where}: the prompt is empty; give at least one token")
        length = len(request.prompt_ids) + request.sampling.max_tokens
        if length > self._max_length:
            raise BackendError(
                f"{where}: prompt and max_tokens make {length} tokens, but the model takes {self._max_length};"
                " shorten the prompt or lower max_tokens"
            )
        vocab_size, forced = self._weights[UNIGRAM].shape[0], request.forced_ids
        if forced is not None and (request.sampling.top_p < 1.0 or request.sampling.top_k):
            raise BackendError(
                f"{where}: tokens that top_p and top_k remove have no logprob; score with top_p 1 and top_k 0"
            )
        given = request.prompt_ids if forced is None else np.concatenate([request.prompt_ids, forced])
        if int(np.max(given)) >= vocab_size or int(np.min(given)) < 0:
            raise BackendError(f"{where}: a token is outside the vocabulary of {vocab_size}")
        if request.resume_from is not None and request.resume_from.basis != request.sampling.basis:
            raise BackendError(f"{where}: the resumed logprobs have another basis than its sampling")


class FakeWeightLoader:
    """Implements ``WeightLoader``; everything is checked before it is copied into the live weights."""

    def __init__(self, generator: FakeGenerator, expected: WeightManifest) -> None:
        self._generator = generator
        self._expected = expected
        self._version: int | None = None
        self._missing: dict[str, int] = {}
        """Elements of each tensor that have not arrived."""

    def expected_manifest(self) -> WeightManifest:
        return self._expected

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        name = self._generator.name
        if self._generator.state == "dead" or self._version is not None:
            raise WeightSyncError(f"{name} is {self._generator.state} and cannot begin version {policy_version}")
        if self._generator.weights_are_offloaded:
            raise WeightSyncError(f"{name} has its weights offloaded; onload them before version {policy_version}")
        lines = self._expected.differences(manifest)
        if lines:
            raise WeightSyncError(f"{name} cannot take policy version {policy_version}: " + "; ".join(lines))
        self._generator.stop_serving()
        self._version = policy_version
        self._missing = {name: spec.num_elements for name, spec in self._expected.tensors.items()}

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            spec = self._expected.tensors.get(name)
            if spec is not None and tuple(tensor.shape) != spec.shape:
                await self._refuse(f"{name}: shape {list(tensor.shape)} arrived, {list(spec.shape)} announced")
            await self._take(name, tensor, tuple((0, size) for size in tensor.shape))

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        for shard in shards:
            await self._take(shard.name, shard.tensor, shard.box)

    async def load_checkpoint(self, directory: Path) -> None:
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            await self._refuse(f"{directory} has no {WEIGHTS_FILE}")
        for file in files:
            try:
                content = load_file(file)
            except (OSError, SafetensorError) as error:
                await self.fail(f"{file}: {error}")
                raise WeightSyncError(f"{file} is truncated or not a safetensors file: {error}") from error
            await self.load_tensors(content.items())

    async def finish(self) -> int:
        if self._version is None:
            raise WeightSyncError(f"{self._generator.name}: finish without begin")
        missing = [name for name, count in self._missing.items() if count]
        if missing:
            await self._refuse(f"tensors of version {self._version} did not arrive: {', '.join(missing)}")
        version, self._version = self._version, None
        self._generator.serve(version)
        return version

    async def fail(self, reason: str) -> None:
        self._version = None
        self._generator.die(reason)

    async def _take(self, name: str, tensor: Tensor, box: tuple[tuple[int, int], ...]) -> None:
        if self._version is None:
            raise WeightSyncError(f"{self._generator.name}: weights arrived without begin")
        spec = self._expected.tensors.get(name)
        live = self._generator.live_weights().get(name)
        if spec is None or live is None:
            return await self._refuse(f"{name}: arrived, but is not a tensor of this model")
        inside = len(box) == len(spec.shape) and live[_slices(box)].shape == tensor.shape
        if not inside or tuple(tensor.shape) != tuple(stop - start for start, stop in box):
            return await self._refuse(f"{name}: box {box} of shape {list(tensor.shape)} in {list(spec.shape)}")
        if tensor.dtype != live.dtype:
            return await self._refuse(f"{name}: dtype {tensor.dtype} arrived, {live.dtype} expected")
        self._missing[name] -= tensor.numel()
        if self._missing[name] < 0:
            return await self._refuse(f"{name}: arrived twice")
        live[_slices(box)] = tensor
        return None

    async def _refuse(self, problem: str) -> None:
        await self.fail(problem)
        raise WeightSyncError(f"{self._generator.name}: {problem}; the replica is dead, restart it")


def fake_text(token_ids: Iterable[int]) -> str:
    """Decode tokens, one letter each; the end of the sequence gives no text."""
    return "".join("" if t == END_OF_SEQUENCE else chr(ord("a") + (t - 1) % 26) for t in token_ids)


def _slices(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
