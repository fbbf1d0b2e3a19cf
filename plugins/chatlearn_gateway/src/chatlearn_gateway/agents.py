"""Runs an agent: a function in a thread, or a program in a process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.plugins.import_string import resolve_import_string

_LOG = logging.getLogger(__name__)
_OUTPUT_BYTES = 1 << 20
"""Bytes of a program's output that are kept: the last ones."""
_SHOWN = 500
"""Characters of a program's errors that a message quotes."""


@dataclass(slots=True, frozen=True)
class AgentCall:
    """What an agent is given."""

    base_url: str
    """Of the server, with ``/v1``, as OpenAI's clients take it. Anthropic's take it without."""
    api_key: str
    model: str
    example: Mapping[str, Any]
    """``id``, ``messages``, ``text``, ``ground_truth``, ``columns``."""


class Agent(Protocol):
    """Acts in one rollout at a time; several run concurrently."""

    async def act(self, call: AgentCall) -> Any:
        """Run to the end and return the result. Cancelled when the rollout has no time left.

        Raises:
            BackendError: it raised, or ended with an error.
        """


class FunctionAgent:
    """A function of the user's. Each call has a thread of its own, so that one that blocks delays nothing; a coroutine
    function has an event loop there.

    Args:
        path: ``package.module:function``.

    Raises:
        ConfigError: there is no such function, or it has a required parameter that is not given to it.
    """

    def __init__(self, path: str) -> None:
        try:
            self._function = resolve_import_string(path)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"options.function {path!r} of the agent cannot be imported: {error}") from error
        if not callable(self._function):
            raise ConfigError(f"options.function {path!r} is a {type(self._function).__name__}, not a function")
        self._path = path
        given = set(AgentCall.__dataclass_fields__)
        parameters = inspect.signature(self._function).parameters.values()
        self._takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
        self._names = {one.name for one in parameters} & given
        for one in parameters:
            variadic = one.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
            if one.default is inspect.Parameter.empty and not variadic and one.name not in given:
                raise ConfigError(
                    f"options.function {path!r} requires the parameter {one.name!r}; an agent is called with those of "
                    f"{', '.join(sorted(given))} that it has. Give the others default values"
                )

    async def act(self, call: AgentCall) -> Any:
        """See ``Agent``. A synchronous function that does not end keeps its thread; its key is worth nothing."""
        everything = {name: getattr(call, name) for name in AgentCall.__dataclass_fields__}
        arguments = everything if self._takes_all else {name: everything[name] for name in self._names}
        here = asyncio.get_running_loop()
        done: asyncio.Future[Any] = here.create_future()
        running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

        def finish(result: Any, error: BaseException | None) -> None:
            if not done.done():
                if error is None:
                    done.set_result(result)
                else:
                    done.set_exception(error)

        async def awaited(result: Any) -> Any:
            task = asyncio.current_task()
            assert task is not None
            running.append((asyncio.get_running_loop(), task))
            return await result

        def work() -> None:
            result, error = None, None
            try:
                result = self._function(**arguments)
                if inspect.isawaitable(result):
                    result = asyncio.run(awaited(result))
            except BaseException as raised:  # user's code: also SystemExit must not vanish with the thread
                error = BackendError(f"agent {self._path} raised {type(raised).__name__}: {raised}")
                error.__cause__ = raised
            with contextlib.suppress(RuntimeError):  # the environment was closed meanwhile
                here.call_soon_threadsafe(finish, result, error)

        thread = threading.Thread(target=work, name=f"agent {self._path}", daemon=True)
        thread.start()
        try:
            return await done
        except asyncio.CancelledError:
            if running:
                loop, task = running[0]
                with contextlib.suppress(RuntimeError):  # it has just ended
                    loop.call_soon_threadsafe(task.cancel)
            elif thread.is_alive():
                _LOG.warning("agent %s did not end in time; its thread goes on, its key is refused", self._path)
            raise


class CommandAgent:
    """A program of the user's, in a process group of its own, which is killed when the rollout ends."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    async def act(self, call: AgentCall) -> Any:
        """See ``Agent``. The result is the last line of standard output, parsed as JSON; None if it is none."""
        variables = {
            "OPENAI_BASE_URL": call.base_url,
            "OPENAI_API_KEY": call.api_key,
            "ANTHROPIC_BASE_URL": call.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": call.api_key,
            "CHATLEARN_MODEL": call.model,
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | variables,
                start_new_session=True,
            )
        except OSError as error:
            raise BackendError(f"agent {self._command[0]!r} does not start (options.command): {error}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            text = json.dumps(call.example, default=str).encode()
            _, output, errors = await asyncio.gather(
                _write(process.stdin, text), _tail(process.stdout), _tail(process.stderr)
            )
            code = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(process.wait())
        if code != 0:
            raise BackendError(
                f"agent {self._command[0]!r} ended with code {code}: {errors.decode(errors='replace')[-_SHOWN:]}"
            )
        lines = output.decode(errors="replace").strip().splitlines()
        try:
            return json.loads(lines[-1]) if lines else None
        except ValueError:
            return None


async def _write(stream: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a program may leave its input unread
        stream.write(text)
        await stream.drain()
    stream.close()


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """The last bytes of a stream, read to its end."""
    kept = b""
    while part := await stream.read(1 << 16):
        kept = (kept + part)[-_OUTPUT_BYTES:]
    return kept
