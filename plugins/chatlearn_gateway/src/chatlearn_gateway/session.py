"""One rollout as a session of requests: recorded as token sequences, stitched without encoding a turn again."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from chatlearn_chat.tool_calls import parsed_arguments
from chatlearn_chat.turn_reader import TextPiece, TurnReader
from chatlearn_chat.turn_stream import TurnStream
from chatlearn_core.data.format import Message
from chatlearn_core.exceptions import BackendError, BackendTimeoutError, DataError, ModelError, TurnLimitError
from chatlearn_core.protocols import OnTokens, RolloutContext
from chatlearn_core.protocols.environment import SequenceBuilder
from chatlearn_core.protocols.prompt_renderer import TooLongError
from chatlearn_core.types import Completion, Sample, SamplingParams, TokenIds
from chatlearn_gateway.chat import (
    Begun,
    ChatRequest,
    FinishedBy,
    OnText,
    RefusedError,
    Reply,
    ToolCall,
    reply_message,
)
from chatlearn_gateway.wire import check_tools

Generate = Callable[[TokenIds, SamplingParams, str | None, OnTokens | None], Awaitable[Completion]]
"""Samples a completion of [P] ids; from another generator than the policy, if its handle is given. The last is called
on the server's event loop with tokens as they are sampled, if the generator streams."""
_LONG_CHARACTERS = 1 << 15
"""A request with more characters is rendered in a thread: encoding it takes tens of milliseconds or more."""
DISCONNECTED = "client disconnected"
"""Exclusion of a turn that its client did not get."""


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
    turn: _Turn


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn that was sampled for a request."""

    number: int
    point: _Point | None
    """The turn that it goes on from."""
    prompt_ids: TokenIds
    completion: Completion
    end_id: int | None
    """The sampled token that ended the turn; None if a limit or a stop string did."""
    key: bytes
    followed: bool = False
    """Whether a request goes on from it."""
    sequence: _Sequence | None = None
    """Where it was recorded."""
    before: tuple[int, SequenceBuilder] | None = None
    """Last number and content of its sequence before it; None if the sequence begins with it."""


@dataclass(slots=True, frozen=True)
class _Live:
    """A turn whose text is sent while it is sampled."""

    stream: TurnStream
    begun: Begun
    on_text: OnText

    @staticmethod
    def of(
        reader: TurnReader, request: ChatRequest, sampling: SamplingParams, begun: Begun, on_text: OnText | None
    ) -> _Live | None:
        """None if the client does not stream, or the text is known only when the turn is complete."""
        stream = None if on_text is None else reader.stream(sampling, tools=request.tools)
        return None if stream is None or on_text is None else _Live(stream, begun, on_text)

    def told(self, start: int, token_ids: Sequence[int]) -> None:
        """An ``OnTokens``."""
        if text := self.stream.told(start, token_ids):
            self.on_text(self.begun, text)


@dataclass(slots=True)
class SessionCounts:
    """What happened in a session."""

    requests: int = 0
    refused: int = 0
    disconnected: int = 0
    """Requests whose client left before it had the whole turn."""
    overridden_sampling: int = 0
    """Requests that asked for other sampling than the run's and were sampled with the run's."""
    other_models: int = 0
    """Requests to another generator than the policy."""
    branches: int = 0
    """Requests that no recorded turn precedes, beyond the first."""

    def sequence_data(self) -> dict[str, float]:
        """The counts by their names in ``Sample.sequence_data``; the run logs means over samples."""
        return {f"environment/{one.name}": float(getattr(self, one.name)) for one in fields(self)}


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
        others: readers of the other generators, by their handles. Their turns are answered, and not recorded.
        overrides_sampling: whether requests that ask for other sampling than the run's are sampled with the run's
            instead of refused.
    """

    context: RolloutContext
    reader: TurnReader
    generate: Generate | None = None
    others: Mapping[str, TurnReader] = field(default_factory=dict)
    overrides_sampling: bool = False
    counts: SessionCounts = field(default_factory=SessionCounts)
    limit: RefusedError | None = None
    """The first refusal because of the context's length or the number of turns."""
    over: bool = False
    """Whether the rollout has ended; further requests are refused."""
    _sequences: list[_Sequence] = field(default_factory=list)
    _points: dict[bytes, _Point] = field(default_factory=dict)
    """Digest of the tools and messages up to a recorded turn -> the end of the turn."""
    _withdrawn: list[_Turn] = field(default_factory=list)
    """Turns that their clients did not get."""

    async def reply(self, request: ChatRequest, on_text: OnText | None = None) -> Reply:
        """Sample the policy's turn.

        Args:
            on_text: called with text while the turn is sampled, if the generator streams.

        Raises:
            RefusedError: the request cannot be answered; the session goes on.
        """
        number, self.counts.requests = self.counts.requests, self.counts.requests + 1
        try:
            return await self._reply(request, number, on_text)
        except RefusedError as error:
            self.counts.refused += 1
            if error.kind in ("context_length", "turn_limit"):
                self.limit = self.limit or error
            raise

    async def num_tokens(self, request: ChatRequest) -> int:
        """Number of tokens that a request's prompt has.

        Raises:
            RefusedError: the chat template refuses the messages, or they do not fit.
        """
        if request.other_model is not None:
            return len(await self._rendered(self.others[request.other_model], request, None, -1))
        point, index, _ = self._precedent(request)
        return len(await self._prompt_ids(request, point, index))

    def samples(self) -> list[Sample]:
        """The recorded samples. The one that was extended last comes first: its end is the end of the rollout.

        A turn that its client did not get is a sample of its own, behind the others and with an exclusion.
        """
        kept = {id(one): (one.last_number, one.builder) for one in self._sequences}
        for turn in self._withdrawn:  # no request goes on from it, so it is the last turn of its sequence
            if turn.before is not None:
                kept[id(turn.sequence)] = turn.before
            else:
                kept.pop(id(turn.sequence), None)
        ordered = sorted(kept.values(), key=lambda one: -one[0])
        found = [builder.sample for _, builder in ordered]
        found += [replace(self._alone(turn).sample, exclusion=DISCONNECTED) for turn in self._withdrawn]
        counts = self.counts.sequence_data()
        names = [self.context.id, *(f"{self.context.id}/{index}" for index in range(1, len(found)))]
        return [
            replace(one, id=name, unit_id=name, sequence_data=one.sequence_data | counts)
            for name, one in zip(names, found, strict=False)
        ]

    async def _reply(self, request: ChatRequest, number: int, on_text: OnText | None) -> Reply:
        if self.over:
            raise RefusedError("over", "the rollout that this key belongs to is over")
        check_tools(request.tools)
        if request.other_model is not None:
            return await self._other_reply(request, request.other_model, number, on_text)
        point, index, digest = self._precedent(request)
        prompt_ids = await self._prompt_ids(request, point, index)
        if len(prompt_ids) >= self.context.max_tokens:
            raise _too_long(f"{len(prompt_ids)} tokens", self.context.max_tokens)
        sampling = self.context.sampling
        self._check_sampling(request, sampling)
        if point is not None:
            self._arrived(point.turn)
        most = sampling.max_tokens if request.max_tokens is None else min(sampling.max_tokens, request.max_tokens)
        sampling = replace(sampling, max_tokens=most, stop=(*sampling.stop, *request.stop))
        live = _Live.of(self.reader, request, sampling, Begun(number, len(prompt_ids)), on_text)
        completion = await self._completion(prompt_ids, sampling, None, live)
        if self.over:
            raise RefusedError("over", "the rollout that this key belongs to is over")
        return self._read(request, number, point, prompt_ids, completion, digest, live)

    async def _other_reply(self, request: ChatRequest, handle: str, number: int, on_text: OnText | None) -> Reply:
        """The turn of another generator than the policy, sampled as the request asks."""
        self.counts.other_models += 1
        reader = self.others[handle]
        prompt_ids = await self._rendered(reader, request, None, -1)
        longest = min(self.context.max_tokens, reader.renderer.max_tokens or self.context.max_tokens)
        if len(prompt_ids) >= longest:
            raise _too_long(f"{len(prompt_ids)} tokens", longest)
        run, end = self.context.sampling, reader.renderer.end_of_turn_id
        if unknown := sorted({"min_p", "seed"} & set(request.sampling)):
            raise RefusedError("invalid", f"{unknown[0]} is not supported. Leave it out", unknown[0])
        given: dict[str, Any] = {"temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k}
        given |= request.sampling
        try:
            sampling = SamplingParams(
                max_tokens=min(run.max_tokens, request.max_tokens or run.max_tokens),
                temperature=float(given["temperature"]),
                top_p=float(given["top_p"]),
                top_k=max(0, int(given["top_k"])),
                stop=request.stop,
                stop_token_ids=() if end is None else (end,),
            )
        except ValueError as error:
            raise RefusedError("invalid", str(error)) from error
        live = _Live.of(reader, request, sampling, Begun(number, len(prompt_ids)), on_text)
        completion = await self._completion(prompt_ids, sampling, handle, live)
        return self._reply_of(reader, request, number, prompt_ids, completion, live)

    def _check_sampling(self, request: ChatRequest, sampling: SamplingParams) -> None:
        """Raises RefusedError: the request asks for other sampling than the run's, and this is not overridden."""
        run = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": 0.0}
        for name, value in request.sampling.items():
            same = name in run and (value == run[name] or (name == "top_k" and value == -1 and run[name] == 0))
            if same:
                continue
            if self.overrides_sampling:
                self.counts.overridden_sampling += 1
                return
            own = f"this run samples with {name}={run[name]}" if name in run else "this run keys the seed of each turn"
            raise RefusedError(
                "invalid",
                f"{name}={value!r} is refused: {own}, and trains on logprobs of that distribution. Leave {name} out of "
                "the request, or set options.request_sampling=run to have it overridden",
                name,
            )

    async def _completion(
        self, prompt_ids: TokenIds, sampling: SamplingParams, role: str | None, live: _Live | None
    ) -> Completion:
        on_tokens = None if live is None else live.told
        try:
            if self.generate is None:
                completion = await self.context.generate(prompt_ids, sampling=sampling, role=role, on_tokens=on_tokens)
            else:
                completion = await self.generate(prompt_ids, sampling, role, on_tokens)
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

    async def _prompt_ids(self, request: ChatRequest, point: _Point | None, index: int) -> TokenIds:
        """[P] the recorded tokens and those of the messages behind them."""
        added = await self._rendered(self.reader, request, point, index)
        if point is None:
            return added
        return np.concatenate([point.sequence.builder.token_ids[: point.num_tokens], added])

    async def _rendered(self, reader: TurnReader, request: ChatRequest, point: _Point | None, index: int) -> TokenIds:
        """The tokens of a request, or of its messages behind a recorded turn."""

        def rendered(reader: TurnReader) -> TokenIds:
            messages = reader.for_template(request.messages)
            if point is None:
                return reader.renderer.prompt(messages, request.tools).token_ids
            return reader.renderer.continuation(messages, index, point.turn.end_id, request.tools)

        try:
            is_long = request.num_characters > _LONG_CHARACTERS
            return await reader.apart(rendered) if is_long else rendered(reader)
        except TooLongError as error:
            recorded = 0 if point is None else point.num_tokens
            raise _too_long(f"{error.at_least + recorded} tokens or more", self.context.max_tokens) from error
        except (DataError, ModelError) as error:
            raise RefusedError("invalid", str(error), "messages") from error

    def _read(
        self,
        request: ChatRequest,
        number: int,
        point: _Point | None,
        prompt_ids: TokenIds,
        completion: Completion,
        digest: bytes,
        live: _Live | None,
    ) -> Reply:
        """What the protocols report of the policy's completion, which is recorded."""
        reply = self._reply_of(self.reader, request, number, prompt_ids, completion, live)
        key = _digest(digest, _comparable(reply_message(reply, parsed_arguments)))
        recorded = _Turn(number, point, prompt_ids, completion, reply.end_id, key)
        return replace(reply, commit=lambda: self._record(recorded), withdraw=lambda: self._withdraw(recorded))

    def _reply_of(
        self,
        reader: TurnReader,
        request: ChatRequest,
        number: int,
        prompt_ids: TokenIds,
        completion: Completion,
        live: _Live | None,
    ) -> Reply:
        sent = "" if live is None else live.stream.sent
        turn = reader.read(completion, tools=request.tools, in_pieces=request.streams and not sent)
        ids = completion.token_ids.tolist()
        pieces = turn.pieces
        if sent:
            if not turn.content.startswith(sent):
                raise RefusedError(
                    "failed", "the generator repeated the request and sampled another answer than it began"
                )
            rest = turn.content[len(sent) :]
            pieces = (TextPiece(rest, (0, len(ids))),) if rest or request.logprobs else ()
        calls = tuple(
            ToolCall(hashlib.sha256(f"{self.context.id}/{number}/{i}".encode()).hexdigest()[:9], *call)
            for i, call in enumerate(turn.calls)
        )
        finish: FinishedBy = "tool_calls" if calls else "stop"
        return Reply(
            number=number,
            content=turn.content,
            tool_calls=calls,
            finish="length" if completion.finish_reason == "length" else finish,
            stop_string=turn.stop_string,
            num_prompt_tokens=len(prompt_ids if completion.prompt_ids is None else completion.prompt_ids),
            num_cached_tokens=completion.num_cached_tokens,
            token_ids=ids,
            token_texts=reader.token_texts(ids) if request.logprobs else [],
            logprobs=completion.logprobs.tolist() if request.logprobs else [],
            pieces=pieces,
            end_id=turn.end_id,
        )

    def _record(self, turn: _Turn) -> None:
        """Add a turn to the sequence that it goes on from, or begin a new one with it."""
        if self.over:
            return
        point = turn.point
        if point is not None and len(point.sequence.builder.token_ids) == point.num_tokens:
            sequence = turn.sequence = point.sequence
            turn.before = (sequence.last_number, sequence.builder)
            builder = copy.copy(sequence.builder)  # its samples are replaced, never changed
            builder.observed(turn.prompt_ids[point.num_tokens :])
            builder.sampled(turn.completion)
            sequence.builder, sequence.last_number = builder, turn.number
        else:
            if self._sequences:
                self.counts.branches += 1
            sequence = turn.sequence = _Sequence(self._alone(turn), turn.number)
            self._sequences.append(sequence)
        self._points[turn.key] = _Point(sequence, len(sequence.builder.token_ids), turn)

    def _withdraw(self, turn: _Turn) -> None:
        """Exclude a turn, unless a request goes on from it: then it had arrived."""
        if not turn.followed and turn not in self._withdrawn:
            self._withdrawn.append(turn)
            self.counts.disconnected += 1

    def _arrived(self, turn: _Turn) -> None:
        turn.followed = True
        if turn in self._withdrawn:
            self._withdrawn.remove(turn)
            self.counts.disconnected -= 1

    def _alone(self, turn: _Turn) -> SequenceBuilder:
        """A sequence that begins with this turn."""
        builder = self.context.sequence(f"/{turn.number}")
        completion = turn.completion
        own = completion if completion.prompt_ids is not None else replace(completion, prompt_ids=turn.prompt_ids)
        builder.sampled(own)
        return builder


def _too_long(length: str, longest: int) -> RefusedError:
    return RefusedError(
        "context_length",
        f"the prompt is too long: {length}, and at most {longest} fit (model.max_length), including those of the "
        "answer. Shorten the messages",
        "messages",
    )


def _comparable(message: Message) -> Any:
    """What of a message must agree for a request to go on from a recorded turn.

    Clients may strip what the policy wrote, leave empty fields out, and add fields of their own.
    """
    role, content = message["role"], message.get("content") or ""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return [role, content.strip() if role == "assistant" else content, calls, message.get("name")]


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.sha256(before + json.dumps(value, sort_keys=True, default=list).encode()).digest()
