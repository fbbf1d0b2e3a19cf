from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from chatlearn_hosting.engine_side.checksums import CorruptedTensorError, checksum
from chatlearn_hosting.engine_side.groups import JoinedGroups, SenderGroup

SPECS = [("a", "float32", [3]), ("", "float32", [1]), ("b", "bfloat16", [2, 2])]
"""The second one is broadcast with the others, and not wanted."""


@pytest.fixture
def joined() -> Iterator[tuple[JoinedGroups, Callable[[torch.Tensor], None]]]:
    """A process's groups, of which one is joined, and what broadcasts in it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    senders: list[SenderGroup] = []
    meeting = threading.Thread(target=lambda: senders.append(SenderGroup(store, "g", "gloo", 2, 0, 20.0)))
    meeting.start()
    groups = JoinedGroups()
    rendezvous: dict[str, Any] = {
        "name": "g",
        "address": f"127.0.0.1:{store.port}",
        "backend": "gloo",
        "world_size": 2,
        "first_rank": 0,
        "timeout_s": 20.0,
    }
    groups.join(rendezvous, 1)
    groups.join(rendezvous, 1)  # once more does nothing
    meeting.join()
    yield groups, lambda flat: senders[0].broadcast(flat).wait()
    groups.close()
    senders[0].close()


def flat_of(values: float) -> torch.Tensor:
    wide = torch.full((4,), values)
    return torch.cat([wide.view(torch.uint8), torch.full((4,), values, dtype=torch.bfloat16).view(torch.uint8)])


def test_broadcasts_reuse_memory_and_skip_unnamed_tensors(joined) -> None:
    groups, send = joined
    addresses = set()
    for value in (1.0, 2.0):
        sending = threading.Thread(target=send, args=(flat_of(value),))
        sending.start()
        found = groups.receive({"group": "g", "tensors": SPECS, "checksums": None}, "cpu")
        sending.join()
        assert [name for name, _ in found] == ["a", "b"]
        assert found[0][1].tolist() == [value] * 3
        assert found[1][1].tolist() == [[value] * 2] * 2
        addresses.add(found[0][1].data_ptr())
    assert len(addresses) == 1


def test_a_corrupted_tensor_is_named(joined) -> None:
    groups, send = joined
    flat = flat_of(1.0)
    checksums = [checksum(flat[:12]), checksum(flat[12:16]), checksum(flat[16:])]
    content = {"group": "g", "tensors": SPECS, "checksums": checksums}
    damaged = flat.clone()
    damaged[17] ^= 1
    for sent in (flat, damaged):
        sending = threading.Thread(target=send, args=(sent,))
        sending.start()
        if sent is flat:
            assert len(groups.receive(content, "cpu")) == 2
        else:
            with pytest.raises(CorruptedTensorError, match="tensor 'b' is corrupted"):
                groups.receive(content, "cpu")
        sending.join()


def test_receiving_from_an_unknown_group_fails_and_leaving_it_does_nothing() -> None:
    groups = JoinedGroups()
    groups.leave("g")
    with pytest.raises(RuntimeError, match="has not joined the group 'g'"):
        groups.receive({"group": "g", "tensors": SPECS}, "cpu")
