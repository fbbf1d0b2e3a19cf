"""What ``broadcast`` cannot exceed between two processes of one machine: gloo over the loopback device, and nothing
around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import TCPStore, Work

from chatlearn_hosting.engine_side.groups import SenderGroup, join

HOST = "127.0.0.1"
PIECE_BYTES = 4 << 20
AHEAD = 2
"""Pieces on their way in each group."""
TIMEOUT_S = 60.0


def send_pieces(num_bytes: int, num_groups: int, tell: Callable[[int], None]) -> float:
    """Seconds of sending so many bytes through so many groups at once.

    Args:
        tell: called with the port at which the other process is to ``receive_pieces``.
    """
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))
    tell(store.port)
    groups = [SenderGroup(store, _name(number), "gloo", 2, 0, TIMEOUT_S) for number in range(num_groups)]
    pieces = torch.ones(-(-num_bytes // PIECE_BYTES), PIECE_BYTES, dtype=torch.uint8)
    groups[0].broadcast(pieces[0]).wait()  # the other end is ready
    start = time.perf_counter()
    _move(groups, list(pieces))
    seconds = time.perf_counter() - start
    for group in groups:
        group.close()
    return seconds


def receive_pieces(port: int, num_bytes: int, num_groups: int) -> None:
    """The other end; each buffer is filled again once what came before has arrived."""
    groups = [join(f"{HOST}:{port}", _name(number), "gloo", 2, 1, TIMEOUT_S) for number in range(num_groups)]
    buffers = torch.zeros(AHEAD * num_groups, PIECE_BYTES, dtype=torch.uint8)
    groups[0].broadcast(buffers[0]).wait()
    _move(groups, [buffers[number % len(buffers)] for number in range(-(-num_bytes // PIECE_BYTES))])
    for group in groups:
        group.close()


def _move(groups: list[SenderGroup], pieces: list[torch.Tensor]) -> None:
    running: list[Work] = []
    for number, piece in enumerate(pieces):
        if number >= AHEAD * len(groups):
            running[number - AHEAD * len(groups)].wait()
        running.append(groups[number % len(groups)].broadcast(piece))
    for work in running:
        work.wait()


def _name(number: int) -> str:
    return f"loopback-{number}"
