"""The HTTP server: one for all rollouts of an environment, each of which has a key of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from chatlearn_chat.tool_calls import parsed_arguments
from chatlearn_core.data.format import Message
from chatlearn_core.exceptions import BackendError
from chatlearn_gateway.anthropic_messages import MessageEvents, MessagesRequest, message_body
from chatlearn_gateway.chat import (
    Begun,
    ChatRequest,
    Event,
    Events,
    RefusalKind,
    RefusedError,
    Reply,
    reply_message,
)
from chatlearn_gateway.openai_chat import ChatCompletionRequest, CompletionEvents, completion_body
from chatlearn_gateway.openai_responses import ResponseEvents, ResponsesRequest, response_body, response_id
from chatlearn_gateway.session import Session
from chatlearn_gateway.wire import Json, ServedBy

START_S = 30.0
"""Longest time in which the server starts, seconds."""
STOP_S = 5.0
"""Longest time in which it ends, seconds; afterwards its daemon thread is abandoned."""
CALL_S = 60.0
"""Longest time in which the server's loop responds, seconds; a chat template may block it for 20."""
KEEP_ALIVE_S = 60
"""Time after which an idle connection is closed, seconds."""
_BACKLOG = 1024
"""Connections that wait to be accepted: every session may connect at once."""
_ENDED_KEYS = 4096
"""Keys of ended rollouts that are remembered, so that an agent which goes on is told why it is refused."""
_TURNS_TO_NOTICE = 3
"""Turns of the event loop in which the server notices that a connection has been closed."""
_JOINED = 4096
"""Small writes are joined up to this length, bytes; longer ones go on to the transport, which limits what waits."""
_UNREAD = "chatlearn.unread"
"""Key of a request's scope: called if the client resets the connection after the response was written."""
B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")
Handler = Callable[["_Open", Request], Awaitable[Response]]


@dataclass(slots=True, eq=False)
class _Open:
    """A session that is being served."""

    session: Session
    name: str
    answered: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    """Id of a response -> the messages up to it, for ``previous_response_id``."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


class Gateway:
    """Serves sessions in a thread and on an event loop of its own. ``start`` and ``close`` block and may be called from
    any other thread.

    Args:
        model: name under which the policy is offered.
        others: names of the other generators; the sessions have readers for them.
        host: address to listen at.
        port: 0 takes a free one.
        max_request_bytes: longest body.
    """

    def __init__(
        self,
        *,
        model: str = "policy",
        others: Collection[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        max_request_bytes: int = 16 << 20,
    ) -> None:
        self.model = model
        self._models_offered = (model, *others)
        self._host, self._port = host, port
        self._max_request_bytes = max_request_bytes
        self._open: dict[str, _Open] = {}
        self._ended: dict[str, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None
        self._closing = False

    @property
    def url(self) -> str:
        """Address of the server, without ``/v1``."""
        assert self._socket is not None, "started"
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self) -> None:
        """Listen, and return when requests are answered.

        Raises:
            BackendError: the address is taken, or the server does not start in time.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # With the protocol named, asyncio sets TCP_NODELAY; without it every second answer takes 40 ms longer.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, self._port))
        except OSError as error:
            listener.close()
            raise BackendError(
                f"the gateway cannot listen at {self._host}:{self._port} (options.host, options.port): {error}"
            ) from error
        self._socket = listener
        config = uvicorn.Config(
            self._application(),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            loop="asyncio",
            http=_Protocol,
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="gateway", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.close()
                raise BackendError(f"the gateway did not start within {START_S:g} s at {self._host}:{self._port}")
            time.sleep(0.005)

    def close(self) -> None:
        """End all sessions and stop serving. Safe to call twice."""
        if self._server is not None and self._loop is not None and not self._closing:
            self._closing = True
            server = self._server
            self._server.should_exit = True
            with contextlib.suppress(RuntimeError):  # its loop has ended by itself
                self._loop.call_soon_threadsafe(self._end_all)
            assert self._thread is not None, "it has started"
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                server.force_exit = True
                self._thread.join(STOP_S)
        if self._socket is not None:
            self._socket.close()

    async def call(self, work: Callable[[], T]) -> T:
        """Run a function on the server's loop after what clients have done so far, and await its result on another.

        Raises:
            BackendError: the server's loop is blocked.
        """
        assert self._loop is not None, "started"

        async def run() -> T:
            await _noticed()
            return work()

        try:
            async with asyncio.timeout(CALL_S):
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))
        except TimeoutError as error:
            raise BackendError(f"the gateway's event loop did not respond within {CALL_S:g} s") from error

    def open(self, session: Session) -> str:
        """Serve a session; return its key."""
        key = "cl-" + secrets.token_urlsafe(24)
        self._open[key] = _Open(session, secrets.token_hex(6))
        return key

    def end(self, key: str) -> None:
        """Refuse further requests with a key, and cancel those that are open. From any thread; safe to call twice."""
        served = self._open.pop(key, None)
        if served is None:
            return
        self._ended[key] = None
        while len(self._ended) > _ENDED_KEYS:
            del self._ended[next(iter(self._ended))]
        served.session.over = True
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed since
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in served.tasks])

    def _end_all(self) -> None:
        for key in list(self._open):
            self.end(key)

    def _serve(self) -> None:
        assert self._server is not None
        assert self._socket is not None
        self._loop = asyncio.new_event_loop()
        try:
            self._loop.run_until_complete(self._server.serve(sockets=[self._socket]))
        finally:
            self._loop.close()

    def _application(self) -> Starlette:
        def served(
            handler: Handler, as_error: Callable[[RefusedError], Json]
        ) -> Callable[[Request], Awaitable[Response]]:
            async def endpoint(request: Request) -> Response:
                try:
                    return await handler(self._session(request), request)
                except RefusedError as error:
                    return JSONResponse(as_error(error), error.status)

            return endpoint

        openai, anthropic = openai_error, anthropic_error
        routes = [
            Route("/v1/chat/completions", served(self._chat_completions, openai), methods=["POST"]),
            Route("/v1/responses", served(self._responses, openai), methods=["POST"]),
            Route("/v1/messages", served(self._messages, anthropic), methods=["POST"]),
            Route("/v1/messages/count_tokens", served(self._count_tokens, anthropic), methods=["POST"]),
            Route("/v1/models", served(self._models, openai)),
            Route("/v1/models/{name:path}", served(self._one_model, openai)),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_route, Exception: _unexpected})

    def _session(self, request: Request) -> _Open:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")
        served = self._open.get(key.strip())
        if served is not None:
            return served
        if key in self._ended:
            raise RefusedError("over", "the rollout that this key belongs to is over")
        raise RefusedError(
            "authentication", "the API key is missing or wrong; use the api_key that the agent was given"
        )

    async def _chat_completions(self, served: _Open, request: Request) -> Response:
        body = await self._body(request, ChatCompletionRequest)
        by = self._served_by(served, body.model)
        sampling = _Sampling(served, request, self._asked(body.model, body.chat()))
        if body.stream:
            return await _streamed(sampling, CompletionEvents(body, by), _chat_event, end="data: [DONE]\n\n")
        reply = await sampling.whole()
        return self._whole(reply, completion_body(reply, body, by))

    async def _responses(self, served: _Open, request: Request) -> Response:
        body = await self._body(request, ResponsesRequest)
        previous: tuple[Message, ...] = ()
        if body.previous_response_id is not None:
            if body.previous_response_id not in served.answered:
                raise RefusedError(
                    "not_found",
                    f"this session has no response {body.previous_response_id!r}",
                    "previous_response_id",
                )
            previous = served.answered[body.previous_response_id]
        by = self._served_by(served, body.model)
        chat = self._asked(body.model, body.chat(previous))

        def answered(reply: Reply) -> None:
            messages = (*chat.messages, reply_message(reply, parsed_arguments))
            served.answered[response_id(reply.number, by)] = messages

        sampling = _Sampling(served, request, chat, answered)
        if body.stream:
            return await _streamed(sampling, ResponseEvents(body, by), _response_event)
        reply = await sampling.whole()
        return self._whole(reply, response_body(reply, body, by))

    async def _messages(self, served: _Open, request: Request) -> Response:
        body = await self._body(request, MessagesRequest)
        if body.max_tokens is None:
            raise RefusedError("invalid", "max_tokens: Field required", "max_tokens")
        by = self._served_by(served, body.model)
        sampling = _Sampling(served, request, self._asked(body.model, body.chat()))
        if body.stream:
            return await _streamed(sampling, MessageEvents(by), _message_event)
        reply = await sampling.whole()
        return self._whole(reply, message_body(reply, by))

    async def _count_tokens(self, served: _Open, request: Request) -> Response:
        body = await self._body(request, MessagesRequest)
        return JSONResponse({"input_tokens": await served.session.num_tokens(self._asked(body.model, body.chat()))})

    async def _models(self, served: _Open, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(name) for name in self._models_offered]})

    async def _one_model(self, served: _Open, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(_model(request.path_params["name"]))

    def _check_model(self, name: str) -> None:
        if name not in self._models_offered:
            offered = ", ".join(map(repr, self._models_offered))
            raise RefusedError("model", f"there is no model {name!r}; this server has {offered}", "model")

    def _asked(self, model: str, request: ChatRequest) -> ChatRequest:
        return request if model == self.model else replace(request, other_model=model)

    def _served_by(self, served: _Open, model: str) -> ServedBy:
        return ServedBy(model, served.name, int(time.time()))

    async def _body(self, request: Request, kind: type[B]) -> B:
        """The checked body.

        Raises:
            RefusedError: it is too long, no JSON, lacks something, or asks for another model.
        """
        received = bytearray()
        try:
            async for part in request.stream():
                received += part
                if len(received) > self._max_request_bytes:
                    raise RefusedError(
                        "too_large",
                        f"the request has more than {self._max_request_bytes} bytes (options.max_request_bytes)",
                    )
        except ClientDisconnect:
            raise RefusedError("invalid", "the client disconnected before its request was complete") from None
        try:
            body = kind.model_validate_json(bytes(received))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise RefusedError("invalid", f"{place or 'body'}: {first['msg']}", place or None) from None
        self._check_model(body.model)  # type: ignore[attr-defined]  # all bodies have it
        return body

    def _whole(self, reply: Reply, body: Json) -> Response:
        response = JSONResponse(body)
        reply.commit()
        return response


class _Sampling:
    """A request's turn while it is sampled, and its text meanwhile.

    Args:
        answered: called with the turn when it is complete.
    """

    def __init__(
        self,
        served: _Open,
        request: Request,
        chat: ChatRequest,
        answered: Callable[[Reply], None] = lambda reply: None,
    ) -> None:
        self.request = request
        self._served = served
        self._answered = answered
        self._texts: asyncio.Queue[tuple[Begun, str] | None] = asyncio.Queue()
        on_text = self._put if chat.streams else None
        self._replying = asyncio.create_task(served.session.reply(chat, on_text))
        self._leaving = asyncio.create_task(_disconnected(request))
        served.tasks.add(self._replying)
        for task in (self._replying, self._leaving):
            task.add_done_callback(lambda _: self._texts.put_nowait(None))

    def _put(self, begun: Begun, text: str) -> None:
        self._texts.put_nowait((begun, text))

    async def text(self) -> tuple[Begun, str] | None:
        """Further text; None when the turn is complete or cannot be."""
        return await self._texts.get()

    def reply(self) -> Reply:
        """The turn, once ``text`` has returned None.

        Raises:
            RefusedError: there is none: the client has disconnected, the session has ended, or the request failed.
        """
        if not self._replying.done():
            self._served.session.counts.disconnected += 1
            raise RefusedError("invalid", "the client disconnected before it was answered")
        if self._replying.cancelled():
            raise RefusedError("over", "the rollout that this key belongs to is over")
        reply = self._replying.result()
        self.request.scope[_UNREAD] = reply.withdraw
        self._answered(reply)
        return reply

    async def whole(self) -> Reply:
        """The turn when it is complete; raises as ``reply`` does."""
        try:
            while await self.text() is not None:
                pass
            return self.reply()
        finally:
            self.end()

    def end(self) -> None:
        """Give the turn up if it is not complete."""
        self._served.tasks.discard(self._replying)
        for task in (self._replying, self._leaving):
            task.cancel()


async def _streamed(
    sampling: _Sampling, events: Events, as_event: Callable[[RefusedError], str], *, end: str = ""
) -> Response:
    """Server-sent events. The turn is recorded before the last one, so that a client that has it may go on.

    They begin with the first text that is certain, or when the turn is complete. The turn is withdrawn if the client
    leaves before the last, or closes the connection with a part of it unread; while it is sampled, it is given up.

    Raises:
        RefusedError: the request is not answered, and no event was sent.
    """
    try:
        first = await sampling.text()
        reply = None if first is not None else sampling.reply()
    except BaseException:
        sampling.end()
        raise
    delivery = _Delivery(sampling, events, as_event, end, first, reply)
    return _EventStream(delivery.parts(), delivery.ended, delivery.size)


class _Delivery:
    """The body of a stream."""

    def __init__(
        self,
        sampling: _Sampling,
        events: Events,
        as_event: Callable[[RefusedError], str],
        end: str,
        first: tuple[Begun, str] | None,
        reply: Reply | None,
    ) -> None:
        self._sampling = sampling
        self._events = events
        self._as_event = as_event
        self._end = end
        self._first = first
        self._reply = reply
        self._settled = False
        """Whether the turn is recorded, or there is none."""
        self._whole: list[str] = []
        if reply is not None:
            self._whole = [*_encoded(events.begun(reply.begun)), *self._rest(reply)]

    @property
    def size(self) -> int | None:
        """Number of bytes; None while the turn is sampled."""
        return sum(len(part.encode()) for part in self._whole) if self._whole else None

    async def parts(self) -> AsyncIterator[str]:
        """The encoded events."""
        encoded = self._whole
        if self._first is not None:
            begun, text = self._first
            yield "".join([*_encoded(self._events.begun(begun)), *_encoded(self._events.text(text))])
            while (more := await self._sampling.text()) is not None:
                yield "".join(_encoded(self._events.text(more[1])))
            try:
                self._reply = self._sampling.reply()
            except RefusedError as error:
                self._settled = True
                yield self._as_event(error)
                return
            encoded = self._rest(self._reply)
        assert self._reply is not None, "complete"
        for part in encoded[:-2]:
            yield part
        await _noticed()
        if await self._sampling.request.is_disconnected():  # writing to a closed connection raises nothing
            return
        self._reply.commit()
        self._settled = True
        yield "".join(encoded[-2:])

    def ended(self) -> None:
        """The response has ended, whether or not all parts were sent."""
        try:
            if not self._settled:
                with contextlib.suppress(RefusedError):  # the turn was not complete, or failed
                    reply = self._reply or self._sampling.reply()
                    reply.withdraw()
        finally:
            self._sampling.end()

    def _rest(self, reply: Reply) -> list[str]:
        return [*_encoded(self._events.rest(reply)), self._end]


class _Protocol(H11Protocol):
    """Reports a client that leaves a written response unread, and writes the last event of a stream with its end.

    Socket buffers may take a whole stream before the client has read any of it. A client that closes the connection
    with unread bytes in its buffer resets it (RFC 1122, 4.2.2.13; Linux does); one that has read everything does not.

    A client may close the connection behind the last event. Were the end of a chunked body, which no client waits for,
    written by itself, it would be unread then.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", _JoinedWrites(transport)))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        scope = cast("dict[str, Any]", self.scope or {})  # none before the first request
        if isinstance(exc, ConnectionError) and _UNREAD in scope:
            scope[_UNREAD]()


class _JoinedWrites:
    """A transport that joins small writes of one turn of the event loop."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pending = bytearray()

    def write(self, data: bytes) -> None:
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending += data
        if len(self._pending) > _JOINED:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._pending:
            data, self._pending = bytes(self._pending), bytearray()
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _EventStream(StreamingResponse):
    """A stream of server-sent events that reports its end, also where the client has left.

    Where its length is known it has one instead of chunks: a client that leaves behind the last event has then read
    every byte.
    """

    def __init__(self, parts: AsyncIterator[str], ended: Callable[[], None], size: int | None) -> None:
        headers = {"cache-control": "no-cache"} | ({} if size is None else {"content-length": str(size)})
        super().__init__(parts, media_type="text/event-stream", headers=headers)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


async def _noticed() -> None:
    """Let the server notice connections that clients have closed."""
    for _ in range(_TURNS_TO_NOTICE):
        await asyncio.sleep(0)


async def _disconnected(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _model(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "chatlearn"}


def _encoded(events: Iterator[Event]) -> list[str]:
    return [_event(name, data) for name, data in events]


def _event(name: str, data: Json) -> str:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n"


_OPENAI_CODES: dict[RefusalKind, tuple[str, str | None]] = {
    "authentication": ("invalid_request_error", "invalid_api_key"),
    "context_length": ("invalid_request_error", "context_length_exceeded"),
    "failed": ("server_error", None),
    "model": ("invalid_request_error", "model_not_found"),
    "over": ("permission_error", "rollout_over"),
    "turn_limit": ("invalid_request_error", "turn_limit_exceeded"),
}
_ANTHROPIC_TYPES: dict[RefusalKind, str] = {
    "authentication": "authentication_error",
    "failed": "api_error",
    "model": "not_found_error",
    "not_found": "not_found_error",
    "over": "permission_error",
    "too_large": "request_too_large",
}


def openai_error(error: RefusedError) -> Json:
    """A refusal in the form of OpenAI's protocols."""
    kind, code = _OPENAI_CODES.get(error.kind, ("invalid_request_error", None))
    return {"error": {"message": str(error), "type": kind, "param": error.parameter, "code": code}}


def anthropic_error(error: RefusedError) -> Json:
    """A refusal in the form of Anthropic's protocol."""
    kind = _ANTHROPIC_TYPES.get(error.kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _chat_event(error: RefusedError) -> str:
    return _event("", openai_error(error))


def _response_event(error: RefusedError) -> str:
    return _event("error", {"type": "error", **openai_error(error)})


def _message_event(error: RefusedError) -> str:
    return _event("error", anthropic_error(error))


def _as_error(request: Request, error: RefusedError, status: int) -> Response:
    form = anthropic_error if request.url.path.startswith("/v1/messages") else openai_error
    return JSONResponse(form(error), status)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is not served: {error.detail}"
    return _as_error(request, RefusedError("not_found", message), error.status_code)


async def _unexpected(request: Request, error: Exception) -> Response:
    return _as_error(request, RefusedError("failed", f"the gateway failed: {type(error).__name__}: {error}"), 500)
