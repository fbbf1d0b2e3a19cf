"""The child's end of ``remote_generator``: reads calls from standard input and answers on standard output."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import sys
from typing import Any, BinaryIO

from chatlearn_core.exceptions import BackendError
from chatlearn_testing.fakes.generator import FakeGenerator

LENGTH_BYTES = 8


def write_message(stream: Any, message: object) -> None:
    """Write one pickle with its length in front, and flush."""
    content = pickle.dumps(message)
    stream.write(len(content).to_bytes(LENGTH_BYTES, "little") + content)
    stream.flush()


def read_message(stream: Any) -> Any:
    """Wait for the next message and return it.

    Raises:
        EOFError: the stream ended.
    """
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        raise EOFError("the other process ended")
    return pickle.loads(stream.read(int.from_bytes(head, "little")))


class GeneratorServer:
    """Runs calls on one event loop, each in a separate task, started in order of arrival."""

    def __init__(self, answers: BinaryIO) -> None:
        self._answers = answers
        self._generator: FakeGenerator | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, calls: BinaryIO) -> None:
        """Answer calls until the caller closes the stream."""
        while True:
            try:
                message = await asyncio.to_thread(read_message, calls)
            except EOFError:
                return
            task = asyncio.create_task(self._answer(*message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, method: str, arguments: tuple[Any, ...], watched: bool) -> None:
        try:
            if method == "setup":
                self._generator = FakeGenerator(*arguments)
                self._generator.setup()
                result: Any = None
            else:
                target: Any = self._generator
                for name in method.split("."):
                    target = getattr(target, name)
                if watched:
                    arguments = (*arguments, lambda start, tokens: self._say(number, "tokens", (start, tokens)))
                result = target(*arguments)
                if inspect.isawaitable(result):
                    result = await result
        except Exception as error:  # the caller gets any exception
            self._say(number, "error", _picklable(error))
        else:
            self._say(number, "result", result)

    def _say(self, number: int, kind: str, content: object) -> None:
        generator = self._generator
        status = (generator.state, generator.health(), generator.policy_version) if generator else ("loading", "", 0)
        write_message(self._answers, (number, kind, content, status))


def main() -> None:
    """Serve the process that started this one."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Printed text must not mix with the messages.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asyncio.run(GeneratorServer(answers).serve(sys.stdin.buffer))


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # the exception's class may run any code
        return BackendError(f"{type(error).__name__}: {error}")
    return error
