from __future__ import annotations

from chatlearn_core.exceptions import BackendError, HostedProcessLostError, WeightSyncError
from chatlearn_runtime_kit.restart_budget import is_death
from chatlearn_workers.rpc_result import Failure


class PluginsOwnError(WeightSyncError):
    """A class that the driver does not have, with a signature that pickle cannot call."""

    def __init__(self, tensor: str, extra: int) -> None:
        super().__init__(f"{tensor} is wrong")


def described(error: Exception) -> Failure:
    try:
        raise error
    except Exception as raised:
        return Failure.of(raised)


def test_an_error_keeps_its_nearest_class_and_words() -> None:
    error = described(PluginsOwnError("w", 1)).error("role 'generator', replica 0", "receive")
    assert type(error) is WeightSyncError
    assert str(error) == "role 'generator', replica 0, receive: w is wrong"
    assert "raise error" in error.__notes__[0]


def test_a_foreign_error_is_shown_with_its_traceback() -> None:
    error = described(KeyError("x")).error("role 'trainer', rank 1 of 2", "update")
    assert type(error) is BackendError
    assert str(error).startswith("role 'trainer', rank 1 of 2, update: KeyError: 'x'\nTraceback (most recent")
    assert "raise error" in str(error)


def test_the_death_of_an_engine_is_one_on_the_driver_too() -> None:
    lost = HostedProcessLostError("its process 7 was killed by signal 9 (SIGKILL)")
    lost.process_is_gone = True
    assert is_death(described(lost).error("role 'generator', replica 0", "setup"))
    assert not is_death(described(HostedProcessLostError("it exited")).error("role 'generator', replica 0", "setup"))
