"""Results that a worker sends back: a value, or a failure that the driver raises again in the worker's name."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from chatlearn_core import exceptions
from chatlearn_core.exceptions import BackendError, ChatLearnError, WorkerPlace


@dataclass(slots=True, frozen=True)
class Failure:
    """An error as text, because a plugin's exception may not be picklable, or its class unknown to the driver."""

    error_class: str
    """The nearest class of ``chatlearn_core.exceptions``."""
    message: str
    traceback: str
    stack: str = ""
    """The stack where the worker hangs, if it reports one."""
    process_is_gone: bool = False
    """Whether an engine's separate process is gone."""

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Describe an error that is being handled."""
        known = (cls.__name__ for cls in type(error).__mro__ if getattr(exceptions, cls.__name__, None) is cls)
        text = str(error) if isinstance(error, ChatLearnError) else f"{type(error).__name__}: {error}"
        stack, is_gone = (error.stack, error.process_is_gone) if isinstance(error, BackendError) else ("", False)
        trace = "".join(traceback.format_exception(error))
        return Failure(next(known, "BackendError"), text, trace, stack, is_gone)

    def error(self, label: str, method: str, place: WorkerPlace | None = None) -> ChatLearnError:
        """The error that the driver raises.

        Its message begins with role, rank and method. ChatLearn's own errors keep their class and message, and the
        traceback becomes a note; other errors show their traceback.
        """
        cls = getattr(exceptions, self.error_class)
        assert issubclass(cls, ChatLearnError)
        error: ChatLearnError = cls(f"{label}, {method}: {self.message}")
        if cls is BackendError:
            return BackendError(f"{error}\n{self.traceback.rstrip()}").at(place, self.traceback)
        if isinstance(error, BackendError):
            error.at(place, self.stack)
            error.process_is_gone = self.process_is_gone
        error.add_note(f"raised in the worker:\n{self.traceback.rstrip()}")
        return error


@dataclass(slots=True, frozen=True)
class RpcResult:
    """A returned value."""

    value: Any
