from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ObjectLostError

from chatlearn_core.runtime.restarts import is_death
from chatlearn_ray.errors import WorkerDiedError
from chatlearn_ray.remote import RemoteWorker


async def test_an_answer_that_is_lost_with_its_node_is_a_death() -> None:
    """The process had answered before its node went: only another one can answer now."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    answer.set_exception(ObjectLostError("00ff", None, ""))
    worker = RemoteWorker("role 'trainer', rank 1 of 2", None, 1.0, "roles.trainer.timeout_s")
    with pytest.raises(
        WorkerDiedError, match=r"'trainer', rank 1 of 2, update: its answer was lost with its node"
    ) as e:
        await worker._answer("update", answer, 1.0)
    assert is_death(e.value)
    assert (e.value.place.role, e.value.place.method) == ("trainer", "update")
