"""What Ray's errors mean to the library that knows no Ray."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
)

from chatlearn_ray.actor import ActorHandle, RayStore
from chatlearn_workers.rpc import (
    AnswerLostError,
    CallError,
    ProcessEndedError,
    StoredValueLostError,
    UnreachableError,
)


def failing_actor(error: RayError) -> Any:
    def remote(*arguments: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_exception(error)
        return answer

    method = SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))
    return SimpleNamespace(invoke=method, is_there=method)


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (RayActorError(error_msg="The actor is dead\n\nbecause it was killed"), ProcessEndedError),
        (ActorUnavailableError("no connection", b"0" * 16), UnreachableError),
        (ObjectLostError("00ff", None, ""), AnswerLostError),
        (RayTaskError("invoke", "traceback", ValueError("x")), CallError),
    ],
)
async def test_ray_errors_become_errors_of_the_library(error: RayError, meaning: type[CallError]) -> None:
    handle = ActorHandle(failing_actor(error))
    for call in (handle.call("invoke", 1), handle.ask("is_there")):
        with pytest.raises(CallError) as caught:
            await call
        assert type(caught.value) is meaning
        assert str(caught.value).startswith(str(error).strip().splitlines()[0][:20]) or meaning is CallError


@pytest.mark.parametrize(
    ("error", "meaning"),
    [(GetTimeoutError("late"), TimeoutError), (ObjectLostError("00ff", None, ""), StoredValueLostError)],
)
def test_a_value_that_does_not_arrive(
    monkeypatch: pytest.MonkeyPatch, error: RayError, meaning: type[Exception]
) -> None:
    def get(references: Any, timeout: float) -> None:
        raise error

    monkeypatch.setattr(ray, "get", get)
    store = pickle.loads(pickle.dumps(RayStore()))
    with pytest.raises(meaning):
        store.get([b"reference"], 1.0)
