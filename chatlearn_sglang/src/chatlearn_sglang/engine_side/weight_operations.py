"""Applies weight operations on every rank of the engine: SGLang calls ``apply`` as its custom weight loader.

The request is encoded as a uint8 tensor, because SGLang passes only tensors to a loader. Each rank then reads the data
itself: a block of shared memory, a checkpoint, a broadcast. An exception in a loader ends SGLang's scheduler, so each
rank writes its outcome to the caller's file instead, one line per rank.

Tied tensors are loaded under both of their names (``copies``): some models of SGLang 0.5.23 keep a separate head
although it is tied (Qwen3-MoE), which would silently stay unchanged; the others skip the second name.

All operations of one weight sync carry its version (``sync``), which groups their data. An adapter's tensors
(``adapter``) are collected until the operation ``adapter`` marks them as complete.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from chatlearn_hosting.engine_side.blocks import MappedBlocks
from chatlearn_hosting.engine_side.cuda_blocks import open_cuda_block
from chatlearn_hosting.engine_side.groups import JoinedGroups

from . import adapter
from .bucketed_load import BucketedLoad

LOADER = f"{__name__}.apply"
"""Import path by which SGLang finds the loader."""

_groups = JoinedGroups()
"""Process groups that this rank has joined; they outlive a sync."""
_blocks = MappedBlocks()
"""Blocks of transports that this rank reads repeatedly."""
_syncs: dict[int, IncomingSync] = {}
"""version -> the sync that is arriving; at most one."""


class IncomingSync:
    """Data that a sync has delivered to this rank."""

    def __init__(self, model: Any) -> None:
        self.weights = BucketedLoad(model)
        self.adapter: dict[str, Tensor] = {}


def encode(operation: str, content: Mapping[str, Any], outcome: str) -> bytes:
    """Return one rank's payload of ``UpdateWeightsFromTensorReqInput``.

    Args:
        operation: a key of ``OPERATIONS``.
        content: the operation's argument.
        outcome: path of the file for the reports.
    """
    request = pickle.dumps((operation, dict(content), outcome))
    # Not ForkingPickler: it would pass a file descriptor between processes that may be unrelated.
    return pickle.dumps([("request", torch.frombuffer(bytearray(request), dtype=torch.uint8))])


def apply(model: torch.nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Run one request on this rank's part of the model, and report the outcome."""
    from sglang.srt.runtime_context import get_parallel

    [(_, request)] = named_tensors
    operation, content, outcome = pickle.loads(request.cpu().numpy().tobytes())
    rank = get_parallel().tp_rank
    report: dict[str, Any] = {"rank": rank, "error": None}
    try:
        OPERATIONS[operation](model, content, rank)
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    descriptor = os.open(outcome, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, json.dumps(report).encode() + b"\n")
    finally:
        os.close(descriptor)


def load_block(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Load tensors from shared memory, read in place."""
    with _blocks.read(content) as tensors:
        _take(model, tensors, content)


def load_cuda_block(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Load tensors from this rank's GPU memory, shared by the process that owns them."""
    _take(model, open_cuda_block(content, torch.cuda.current_device()), content)
    # The owner reuses the block as soon as this is reported as done.
    torch.cuda.synchronize()


def load_checkpoint(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Load tensors from safetensors files: (file, [(name in the file, name to load)])."""
    _take(model, _from_files(content["files"]), content)


def join_group(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Join a process group; the engine's ranks get consecutive ranks from ``first_rank`` on."""
    _groups.join(content, rank)


def load_broadcast(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Load tensors from one broadcast."""
    _take(model, iter(_groups.receive(content, "cuda")), content)


def leave_group(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Leave a process group, if this rank has joined it."""
    _groups.leave(content["name"])


def finish(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """End a sync of whole weights."""
    _incoming_sync(model, content["sync"]).weights.finish()
    _syncs.clear()


def serve_adapter(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """End a sync of an adapter and serve it; see ``adapter.replace``."""
    adapter.replace(_incoming_sync(model, content["sync"]).adapter, content["config"], content["absent"])
    _syncs.clear()


LAST = "finish"
"""The operation that ends a sync of whole weights; the engine then drops caches computed with the old weights."""
OPERATIONS: Mapping[str, Callable[[Any, Mapping[str, Any], int], None]] = {
    "block": load_block,
    "cuda_block": load_cuda_block,
    "checkpoint": load_checkpoint,
    "join": join_group,
    "broadcast": load_broadcast,
    "leave": leave_group,
    LAST: finish,
    "adapter": serve_adapter,
}


def _take(model: Any, tensors: Iterable[tuple[str, Tensor]], content: Mapping[str, Any]) -> None:
    """Load tensors that are valid only during this call."""
    arrival = _incoming_sync(model, content["sync"])
    if content["adapter"]:
        arrival.adapter.update((name, tensor.to("cpu", copy=True)) for name, tensor in tensors)
    else:
        arrival.weights.give(_with_copies(tensors, content["copies"]))


def _incoming_sync(model: Any, sync: int) -> IncomingSync:
    """Return the record of this sync; discards the remains of a failed one."""
    if sync not in _syncs:
        _syncs.clear()
        _syncs[sync] = IncomingSync(model)
    return _syncs[sync]


def _with_copies(
    tensors: Iterable[tuple[str, Tensor]], copies: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor under its name and under the names that are tied to it."""
    for name, tensor in tensors:
        yield name, tensor
        for alias in copies.get(name, ()):
            yield alias, tensor


def _from_files(files: list[tuple[str, list[tuple[str, str]]]]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file, names in files:
        with safe_open(file, framework="pt") as handle:
            for stored, name in names:
                yield name, handle.get_tensor(stored)
