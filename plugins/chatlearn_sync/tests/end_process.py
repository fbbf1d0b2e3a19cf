"""One end of a transport in a process of its own: ``python end_process.py send|receive``, spoken to over its pipes.

Lines of base64 pickles. In: what to do. Out: a sender's offer, then how it ended. ``die_at`` names the tensor at which
the process kills itself.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import signal
import sys
from typing import Any

import torch

from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.types import Endpoint, SyncOffer, SyncRequest
from chatlearn_testing.suites.weight_sync_fixtures import KeepingLoader, StreamingTrainer


def read() -> Any:
    return pickle.loads(base64.b64decode(sys.stdin.readline()))


def write(value: Any) -> None:
    print(base64.b64encode(pickle.dumps(value)).decode(), flush=True)


def before(die_at: str | None) -> Any:
    def check(name: str) -> None:
        if name == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    return check


def send(
    transport: str, plan: SyncRequest, here: Endpoint, tensors: dict[str, torch.Tensor], die_at: str | None
) -> None:
    registry = discover_plugins()
    record = registry.select("weight_sync", transport, "test")
    sender = registry.load_factory(record, "sender")(registry.load_options(record)(), here)
    write(sender.offer(plan))
    num_ranks = len(plan.senders)
    assert read() == "go", "a runtime sends when every rank has offered"
    try:
        write(sender.send(plan, StreamingTrainer(tensors, here.rank, num_ranks, before(die_at))))
    except Exception as error:
        write(f"{type(error).__name__}: {error}")
    sender.release(plan)
    sender.close()


def receive(transport: str, plan: SyncRequest, here: Endpoint, offers: list[SyncOffer], die_at: str | None) -> None:
    registry = discover_plugins()
    record = registry.select("weight_sync", transport, "test")
    receiver = registry.load_factory(record, "receiver")(registry.load_options(record)(), here)
    loader = KeepingLoader(before(die_at))
    try:
        asyncio.run(receiver.receive(plan, offers, loader))
        write(loader.loaded)
    except Exception as error:
        write(f"{type(error).__name__}: {error}")
    receiver.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"send": send, "receive": receive}[sys.argv[1]](*read())
