"""Requests to an HTTP endpoint, limited in number and time, and repeated after temporary failures."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from chatlearn_core.exceptions import BackendError, ConfigError, DataError, RoleLostError
from chatlearn_rewards.endpoint_options import EndpointOptions

_SHOWN = 200
"""Number of characters of a response that an error quotes."""
_LARGEST_BYTES = 64 << 20
"""Longest response in bytes; a longer one cannot be a verdict."""
_TEMPORARY = frozenset({408, 425, 429})
"""Statuses, in addition to 5xx, after which the same request may succeed later."""
_CLOSING_S = 10.0
_JITTER = random.Random()
"""Of its own: the global generator belongs to the run."""
T = TypeVar("T")


class EndpointFailedError(BackendError):
    """A request failed although it was repeated as often as the options allow."""


@dataclass(slots=True, frozen=True)
class _Failure:
    """One failed attempt of a request that may be repeated."""

    reason: str
    retry_after_s: float | None = None


class HttpEndpoint:
    """Posts JSON to one URL.

    A separate thread with its own event loop keeps the connections. So any event loop may call ``post``, and ``close``
    works even if the caller's loop has ended.

    Args:
        url: absolute URL of every request.
        what: the caller, for error messages, such as ``reward 'judge' of role 'reward'``.
        address_options: the options that the URL is made of, for error messages, such as ``url``.

    Raises:
        ConfigError: the environment variable with the key is not set, or its value cannot be sent. The message names
            the variable and never shows its value.
    """

    def __init__(self, url: str, options: EndpointOptions, what: str, address_options: str) -> None:
        self._url = url
        self._address_options = address_options
        self._options = options
        self._what = what
        self._key = None if options.api_key_env is None else _key(options.api_key_env, what)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: httpx.AsyncClient | None = None
        self._open = asyncio.Semaphore(options.max_concurrent)

    def start(self) -> None:
        """Start the thread."""
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        limits = httpx.Limits(max_connections=self._options.max_concurrent)
        self._client = httpx.AsyncClient(headers=headers, timeout=self._options.timeout_s, limits=limits)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel open requests, close connections and end the thread. A repeated call does nothing."""
        loop, thread, client = self._loop, self._thread, self._client
        self._loop = self._thread = self._client = None
        if loop is None or thread is None or client is None:
            return
        asyncio.run_coroutine_threadsafe(_end(client), loop).result(_CLOSING_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSING_S)
        loop.close()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the endpoint's thread and return its result. Cancelling the caller cancels it."""
        assert self._loop is not None, "the endpoint was not started"
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def post(self, body: Mapping[str, Any], deadline: float | None = None) -> Any:
        """Post a request and return the decoded JSON of the response.

        Args:
            deadline: reading of ``time.monotonic()`` at which all attempts and waits end; None limits only each
                attempt.

        Raises:
            DataError: the body cannot be written as JSON, or the endpoint refuses this request (400, 413, 422).
            RoleLostError: it refuses all requests: the key is wrong (401, 403), or nothing is at the URL (404 and other
                statuses that are not 200). It ends the run.
            EndpointFailedError: all of the ``retries + 1`` attempts failed, or the deadline passed.
        """
        return await self.run(self.post_here(body, deadline))

    async def post_here(self, body: Mapping[str, Any], deadline: float | None = None) -> Any:
        """``post`` for a caller that runs in the endpoint's thread (``run``)."""
        told = ["no attempt was made"]
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            content = json.dumps(dict(body), allow_nan=False).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"the request cannot be written as JSON: {error}") from error
        try:
            async with asyncio.timeout(left_s):
                return await self._tries(content, told)
        except TimeoutError:
            raise EndpointFailedError(
                f"{self._what}: {self._url} gave no answer in time (deadline_s); last: {told[-1]}"
            ) from None

    async def _tries(self, content: bytes, told: list[str]) -> Any:
        """Repeat the request until an attempt succeeds, and return the decoded response.

        Args:
            told: receives the state of each attempt.
        """
        options, tries = self._options, self._options.retries + 1
        for attempt in range(1, tries + 1):
            async with self._open:
                told.append(f"attempt {attempt} of {tries} has no answer yet")
                answer = await self._try(content)
            if not isinstance(answer, _Failure):
                return answer.value
            told.append(f"attempt {attempt} of {tries}: {answer.reason}")
            wait_s = min(options.backoff_s * 2.0 ** (attempt - 1), options.max_wait_s)
            wait_s *= _JITTER.uniform(0.5, 1.0)  # spreads the repetitions of callers that failed together
            if answer.retry_after_s is not None:
                wait_s = max(wait_s, answer.retry_after_s)
            if attempt == tries or wait_s > options.max_wait_s:
                asked = (
                    f", and requests a wait of {wait_s:g} s (max_wait_s: {options.max_wait_s:g})"
                    if attempt < tries
                    else ""
                )
                raise EndpointFailedError(
                    f"{self._what}: {self._url} failed at attempt {attempt} of {tries}: {answer.reason}{asked}"
                )
            await asyncio.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    async def _try(self, sent: bytes) -> _Json | _Failure:
        assert self._client is not None
        timeout_s = self._options.timeout_s
        request = self._client.stream("POST", self._url, content=sent, headers={"Content-Type": "application/json"})
        try:
            async with asyncio.timeout(timeout_s), request as response:
                content = await _content(response)
        except (TimeoutError, httpx.TimeoutException):
            return _Failure(f"no complete response within timeout_s, {timeout_s:g} s")
        except httpx.TransportError as error:
            return _Failure(self.without_key(f"{type(error).__name__}: {error}"))
        if content is None:
            return _Failure(f"the response is longer than {_LARGEST_BYTES >> 20} MiB")
        return self._read(response, content)

    def _read(self, response: httpx.Response, content: bytes) -> _Json | _Failure:
        status = response.status_code
        shown = self.without_key(content.decode("utf-8", "replace"))[:_SHOWN]
        told = f"HTTP status {status}: {shown!r}"
        if status in _TEMPORARY or status >= 500:
            return _Failure(told, _retry_after_s(response.headers.get("Retry-After")))
        if status in (401, 403):
            key = self._options.api_key_env
            remedy = (
                "set api_key_env to the variable that holds its key"
                if key is None
                else (f"the environment variable {key} must have a key that the endpoint accepts")
            )
            raise RoleLostError(f"{self._what}: {self._url} refuses access, {told}; {remedy}")
        if status in (400, 413, 422):
            raise DataError(f"{self._url} refuses the request, {told}")
        if status != 200:
            raise RoleLostError(f"{self._what}: {self._url} answers with {told}; correct {self._address_options}")
        try:
            return _Json(json.loads(content))
        except (ValueError, RecursionError) as error:
            return _Failure(f"the response is not JSON ({error}): {shown!r}")

    def without_key(self, text: str) -> str:
        """Replace the key in a text by ``***``."""
        return text if self._key is None else text.replace(self._key, "***")


@dataclass(slots=True, frozen=True)
class _Json:
    value: Any


async def _end(client: httpx.AsyncClient) -> None:
    """Cancel requests, so that their callers are cancelled too, and close connections."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await client.aclose()


async def _content(response: httpx.Response) -> bytes | None:
    """Read and return the body; None if it is too long."""
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > _LARGEST_BYTES:
            return None
    return bytes(content)


def _key(variable: str, what: str) -> str:
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(
            f"{what}: the environment variable {variable} (api_key_env) is not set or empty; set it to"
            " the endpoint's key in every process that computes rewards"
        )
    if not all("!" <= letter <= "~" for letter in key):
        raise ConfigError(
            f"{what}: the key in the environment variable {variable} (api_key_env) has spaces, line ends or letters "
            "outside ASCII; an HTTP header cannot carry these. Set it to the key alone"
        )
    return key


def _retry_after_s(header: str | None) -> float | None:
    """Return the seconds of a ``Retry-After`` header (RFC 9110, 10.2.3), a number or a date; None if not readable."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        until = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
