"""One rollout as a session of requests: recorded as token sequences, stitched without encoding a turn again."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from chatlearn_chat.tool_calls import parsed_arguments
from chatlearn_chat.turn_reader import TurnReader
from chatlearn_core.data.format import Message
from chatlearn_core.exceptions import BackendError, BackendTimeoutError, DataError, ModelError, TurnLimitError
from chatlearn_core.protocols import RolloutContext
from chatlearn_core.protocols.environment import SequenceBuilder
from chatlearn_core.types import Completion, Sample, SamplingParams, TokenIds
from chatlearn_gateway.chat import ChatRequest, FinishedBy, RefusedError, Reply, ToolCall, reply_message

Generate = Callable[[TokenIds, SamplingParams], Awaitable[Completion]]
"""Samples a completion of [P] ids."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """One training sample that is being recorded."""

    builder: SequenceBuilder
    last_number: int
    """Number of the last request that extended it."""


@dataclass(slots=True, frozen=True)
class _Point:
    """The end of a turn in a sequence, from which a request may go on."""

    sequence: _Sequence
    num_tokens: int
    end_id: int | None
    """The sampled token that ended the turn; None if a limit or a stop string did."""


@dataclass(slots=True)
class SessionCounts:
    """What happened in a session."""

    requests: int = 0
    refused: int = 0
    disconnected: int = 0
    """Replies that the client did not wait for; they are not trained on."""
    branches: int = 0
    """Requests that no recorded turn precedes, beyond the first."""


@dataclass(slots=True, eq=False)
class Session:
    """Answers the requests of one rollout and records them. All methods run on the event loop of the server.

    A request whose messages begin with those of a recorded turn, and that turn, goes on from its tokens: the sampled
    ids stay, and only the messages behind them are rendered. If the turn is the last of its sequence, the sequence
    grows; otherwise a new one begins, with the shared tokens as its prompt, so that no sampled token is trained on
    twice. A request that no recorded turn precedes begins a new sequence, too.

    Args:
        context: of the rollout.
        reader: of the run's tokenizer; its renderer renders the prompts.
        generate: samples; by default ``context.generate``. Given where this must happen on another event loop.
    """

    context: RolloutContext
    reader: TurnReader
    generate: Generate | None = None
    counts: SessionCounts = field(default_factory=SessionCounts)
    limit: RefusedError | None = None
    """The first refusal because of the context's length or the number of turns."""
    over: bool = False
    """Whether the rollout has ended; further requests are refused."""
    _sequences: list[_Sequence] = field(default_factory=list)
    _points: dict[bytes, _Point] = field(default_factory=dict)
    """Digest of the tools and messages up to a recorded turn -> the end of the turn."""

    async def reply(self, request: ChatRequest) -> Reply:
        """Sample the policy's turn.

        Raises:
            RefusedError: the request cannot be answered; the session goes on.
        """
        number, self.counts.requests = self.counts.requests, self.counts.requests + 1
        try:
            return await self._reply(request, number)
        except RefusedError as error:
            self.counts.refused += 1
            if error.kind in ("context_length", "turn_limit"):
                self.limit = self.limit or error
            raise

    def num_tokens(self, request: ChatRequest) -> int:
        """Number of tokens that a request's prompt has.

        Raises:
            RefusedError: the chat template refuses the messages.
        """
        point, index, _ = self._precedent(request)
        return len(self._prompt_ids(request, point, index))

    def samples(self) -> list[Sample]:
        """The recorded samples. The one that was extended last comes first: its end is the end of the rollout."""
        found = []
        for index, one in enumerate(sorted(self._sequences, key=lambda one: -one.last_number)):
            name = self.context.id if index == 0 else f"{self.context.id}/{index}"
            found.append(replace(one.builder.sample, id=name, unit_id=name))
        return found

    async def _reply(self, request: ChatRequest, number: int) -> Reply:
        if self.over:
            raise RefusedError("over", "the rollout that this key belongs to is over")
        point, index, digest = self._precedent(request)
        prompt_ids = self._prompt_ids(request, point, index)
        longest = self.context.max_tokens
        if len(prompt_ids) >= longest:
            raise RefusedError(
                "context_length",
                f"the prompt is too long: {len(prompt_ids)} tokens, and at most {longest} fit (model.max_length), "
                "including those of the answer. Shorten the messages",
                "messages",
            )
        sampling = self.context.sampling
        most = sampling.max_tokens if request.max_tokens is None else min(sampling.max_tokens, request.max_tokens)
        sampling = replace(sampling, max_tokens=most, stop=(*sampling.stop, *request.stop))
        completion = await self._completion(prompt_ids, sampling)
        if self.over:
            raise RefusedError("over", "the rollout that this key belongs to is over")
        return self._read(request, number, point, prompt_ids, completion, digest)

    async def _completion(self, prompt_ids: TokenIds, sampling: SamplingParams) -> Completion:
        try:
            if self.generate is None:
                completion = await self.context.generate(prompt_ids, sampling=sampling)
            else:
                completion = await self.generate(prompt_ids, sampling)
        except TurnLimitError as error:
            raise RefusedError("turn_limit", str(error)) from error
        except BackendTimeoutError as error:
            raise RefusedError("failed", f"the generator did not answer in time: {error}") from error
        except BackendError as error:
            raise RefusedError("failed", f"the generator failed: {error}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RefusedError("over", "the rollout that this key belongs to is over") from None
        if completion.finish_reason == "abort":
            raise RefusedError("failed", "the generator was interrupted before the answer was complete")
        return completion

    def _precedent(self, request: ChatRequest) -> tuple[_Point | None, int, bytes]:
        """The longest recorded beginning of a request, the position of its last message, and the request's digest."""
        digest = _digest(b"", request.tools)
        found: tuple[_Point | None, int] = (None, -1)
        for index, message in enumerate(request.messages):
            digest = _digest(digest, _comparable(message))
            if (point := self._points.get(digest)) is not None and index + 1 < len(request.messages):
                found = (point, index)
        return (*found, digest)

    def _prompt_ids(self, request: ChatRequest, point: _Point | None, index: int) -> TokenIds:
        """[P] the recorded tokens and those of the messages behind them."""
        try:
            if point is None:
                return self.reader.renderer.prompt(request.messages, request.tools).token_ids
            added = self.reader.renderer.continuation(request.messages, index, point.end_id, request.tools)
        except (DataError, ModelError) as error:
            raise RefusedError("invalid", str(error), "messages") from error
        return np.concatenate([point.sequence.builder.token_ids[: point.num_tokens], added])

    def _read(
        self,
        request: ChatRequest,
        number: int,
        point: _Point | None,
        prompt_ids: TokenIds,
        completion: Completion,
        digest: bytes,
    ) -> Reply:
        """What the protocols report of a completion."""
        turn = self.reader.read(completion, has_tools=bool(request.tools), in_pieces=request.streams)
        ids = completion.token_ids.tolist()
        calls = tuple(
            ToolCall(hashlib.sha256(f"{self.context.id}/{number}/{i}".encode()).hexdigest()[:9], *call)
            for i, call in enumerate(turn.calls)
        )
        finish: FinishedBy = "tool_calls" if calls else "stop"
        reply = Reply(
            number=number,
            content=turn.content,
            tool_calls=calls,
            finish="length" if completion.finish_reason == "length" else finish,
            stop_string=turn.stop_string,
            num_prompt_tokens=len(prompt_ids if completion.prompt_ids is None else completion.prompt_ids),
            num_cached_tokens=completion.num_cached_tokens,
            token_ids=ids,
            token_texts=self.reader.token_texts(ids) if request.logprobs else [],
            logprobs=completion.logprobs.tolist() if request.logprobs else [],
            pieces=turn.pieces,
            commit=lambda: self._record(number, point, prompt_ids, completion, turn.end_id, key),
        )
        key = _digest(digest, _comparable(reply_message(reply, parsed_arguments)))
        return reply

    def _record(
        self,
        number: int,
        point: _Point | None,
        prompt_ids: TokenIds,
        completion: Completion,
        end_id: int | None,
        key: bytes,
    ) -> None:
        """Add a turn to the sequence that it goes on from, or begin a new one with it."""
        if self.over:
            return
        sequence = None if point is None else point.sequence
        if sequence is not None and point is not None and len(sequence.builder.token_ids) == point.num_tokens:
            sequence.builder.observed(prompt_ids[point.num_tokens :])
            sequence.builder.sampled(completion)
            sequence.last_number = number
        else:
            if self._sequences:
                self.counts.branches += 1
            sequence = _Sequence(self.context.sequence(f"/{len(self._sequences)}"), number)
            own = completion if completion.prompt_ids is not None else replace(completion, prompt_ids=prompt_ids)
            sequence.builder.sampled(own)
            self._sequences.append(sequence)
        self._points[key] = _Point(sequence, len(sequence.builder.token_ids), end_id)


def _comparable(message: Message) -> Any:
    """What of a message must agree for a request to go on from a recorded turn.

    Clients may strip what the policy wrote, leave empty fields out, and add fields of their own.
    """
    role, content = message["role"], message.get("content") or ""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return [role, content.strip() if role == "assistant" else content, calls, message.get("name")]


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.sha256(before + json.dumps(value, sort_keys=True, default=list).encode()).digest()
