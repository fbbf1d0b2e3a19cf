"""Transports between real processes, and what each end sees when the other is killed in the middle of a sync."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chatlearn_core.exceptions import BackendError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_testing.suites.weight_sync_fixtures import KeepingLoader, StreamingTrainer, assert_loaded

pytestmark = pytest.mark.slow  # every end is a process that imports torch
TOGETHER = ["shared_memory", "broadcast"]
"""Transports whose ends must live at the same time; the others leave whole versions on a disk, or none."""


class EndProcess:
    """A child that runs ``end_process.py``."""

    def __init__(self, mode: str, *job: object) -> None:
        script = Path(__file__).parent / "end_process.py"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(script), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.write(job)

    def write(self, value):
        self.process.stdin.write(base64.b64encode(pickle.dumps(value)).decode() + "\n")
        self.process.stdin.flush()

    def read(self):
        """What it says next; None if it was killed."""
        line = self.process.stdout.readline()
        return pickle.loads(base64.b64decode(line)) if line else None


@pytest.fixture
def start():
    children = []

    def make(mode, *job):
        children.append(EndProcess(mode, *job))
        return children[-1]

    yield make
    for child in children:
        child.process.kill()
        child.process.wait()
        child.process.stdin.close()
        child.process.stdout.close()


@pytest.fixture
def end():
    """Build one end of a transport in this process; closed at the end."""
    registry, made = discover_plugins(), []

    def make(transport, attribute, endpoint):
        record = registry.select("weight_sync", transport, "test")
        made.append(registry.load_factory(record, attribute)(registry.load_options(record)(), endpoint))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def plan(tensors, make_plan, endpoint):
    """Two sender ranks, two replicas; every bucket holds about one tensor."""
    host = os.uname().nodename
    ends = {
        role: tuple(dataclasses.replace(endpoint(role, **place), host=host, process=0) for place in places)
        for role, places in {
            "trainer": [{"rank": 0}, {"rank": 1}],
            "generator": [{"replica": 0}, {"replica": 1}],
        }.items()
    }
    return make_plan(tensors, senders=ends["trainer"], receivers=ends["generator"], timeout_s=120.0, bucket_bytes=2048)


@pytest.fixture(autouse=True)
def shared_memory_is_left_as_it_was():
    before = set(Path("/dev/shm").iterdir())
    yield
    left = {path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith("chatlearn")}
    assert not left


@pytest.mark.parametrize("transport", TOGETHER)
def test_two_sender_processes_share_the_work(transport, plan, tensors, start, end):
    plan = dataclasses.replace(plan, receivers=plan.receivers[:1])
    children = [start("send", transport, plan, sender, tensors, None) for sender in plan.senders]
    offers = [child.read() for child in children]
    for child in children:
        child.write("go")
    here, loader = end(transport, "receiver", plan.receivers[0]), KeepingLoader()
    asyncio.run(here.receive(plan, offers, loader))
    assert_loaded(loader, tensors)
    sent = [child.read() for child in children]
    assert all(isinstance(num_bytes, int) and num_bytes > 0 for num_bytes in sent), "both ranks own some of it"


@pytest.mark.parametrize("transport", TOGETHER)
def test_a_sender_that_is_killed_midway_is_named_at_once(transport, plan, tensors, start, end):
    plan = dataclasses.replace(plan, senders=plan.senders[:1], receivers=plan.receivers[:1], timeout_s=60.0)
    child = start("send", transport, plan, plan.senders[0], tensors, "scale")
    offer = child.read()
    child.write("go")
    receiver, loader = end(transport, "receiver", plan.receivers[0]), KeepingLoader()
    with pytest.raises(BackendError) as caught:
        asyncio.run(receiver.receive(plan, [offer], loader))
    assert "role 'trainer' replica 0 rank 0" in str(caught.value)
    assert "within" not in str(caught.value), "it is known at once, not after the timeout"
    assert child.process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("transport", TOGETHER)
def test_a_receiver_that_is_killed_midway_is_named_at_once(transport, plan, tensors, start, end):
    plan = dataclasses.replace(plan, senders=plan.senders[:1], receivers=plan.receivers[:1], timeout_s=60.0)
    sender = end(transport, "sender", plan.senders[0])
    offer = sender.offer(plan)
    child = start("receive", transport, plan, plan.receivers[0], [offer], "layer.0.weight")
    with pytest.raises(BackendError) as caught:
        sender.send(plan, StreamingTrainer(tensors))
    assert "role 'generator' replica 0" in str(caught.value)
    assert "disconnected" in str(caught.value)
    sender.release(plan)
    assert child.process.wait(10) == -signal.SIGKILL


def test_shared_memory_goes_on_without_a_replica_that_was_killed(plan, tensors, start, end):
    plan = dataclasses.replace(plan, senders=plan.senders[:1])
    sender = end("shared_memory", "sender", plan.senders[0])
    offer = sender.offer(plan)
    killed = start("receive", "shared_memory", plan, plan.receivers[0], [offer], "layer.0.weight")
    lives = start("receive", "shared_memory", plan, plan.receivers[1], [offer], None)
    assert sender.send(plan, StreamingTrainer(tensors)) == sum(tensor.nbytes for tensor in tensors.values())
    sender.release(plan)
    assert killed.read() is None
    assert lives.read().keys() == tensors.keys()
