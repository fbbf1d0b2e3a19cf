"""Where the ranks of a trainer meet: on loopback if one node has them all, else behind a secret."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chatlearn_workers.trainer_group import RemoteTrainerGroup
from chatlearn_workers.trainer_worker import TrainerWorker


class FakeWorker:
    def __init__(self, network: str) -> None:
        self.network, self.asked = network, []

    async def call(self, method: str, *arguments: Any) -> Any:
        self.asked.append((method, *arguments))
        return self.network if method == "network" else "tcp://here:5"


@pytest.mark.parametrize(("networks", "on_loopback"), [("aa", True), ("ab", False)])
async def test_ranks_of_several_nodes_get_a_secret(networks: str, on_loopback: bool) -> None:
    group = RemoteTrainerGroup("trainer", SimpleNamespace(), {})  # type: ignore[arg-type]  # it is not asked
    workers = [FakeWorker(network) for network in networks]
    group.workers = workers  # type: ignore[assignment]  # the part that is used
    rendezvous, secret = await group._rendezvous()
    assert rendezvous == "tcp://here:5"
    assert workers[0].asked[-1] == ("find_rendezvous", on_loopback)
    assert (secret is None) is on_loopback
    assert secret is None or len(secret) == 64


async def test_processes_of_one_machine_see_one_network() -> None:
    worker = TrainerWorker.__new__(TrainerWorker)
    worker._port = None
    assert await worker.network() == await worker.network()
    try:
        address = await worker.find_rendezvous(True)
        assert address.startswith("tcp://127.0.0.1:")
    finally:
        worker._release_port()
