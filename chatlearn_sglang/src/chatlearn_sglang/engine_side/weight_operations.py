"""New weights, as every rank of the engine takes them: SGLang calls ``apply`` as its custom weight loader.

The request comes as a uint8 tensor, since SGLang hands tensors to a loader and nothing else. What it says, each rank
reads by itself: a block of shared memory, a checkpoint, a broadcast. A loader that raises ends SGLang's scheduler, so
the outcome is written to a file that the caller gave, one line a rank.

Tied tensors are loaded under both of their names (``copies``): some models of SGLang 0.5.23 keep a head of their own
although it is tied (Qwen3-MoE), which otherwise stays what it was, without an error; the others skip the second name.

The operations of one weight sync carry its version (``sync``): what they bring belongs together. An adapter's tensors
(``adapter``) are kept until the operation ``adapter`` says that they are complete.
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
"""Import path under which SGLang finds the loader."""

_groups = JoinedGroups()
"""Groups that this rank has joined; they outlive a sync."""
_blocks = MappedBlocks()
"""Blocks of transports that this rank reads again and again."""
_syncs: dict[int, Arrival] = {}
"""The sync that is arriving, by its version."""


class Arrival:
    """What a sync has brought to this rank."""

    def __init__(self, model: Any) -> None:
        self.weights = BucketedLoad(model)
        self.adapter: dict[str, Tensor] = {}


def encode(operation: str, content: Mapping[str, Any], outcome: str) -> bytes:
    """One rank's payload of ``UpdateWeightsFromTensorReqInput``.

    Args:
        operation: a key of ``OPERATIONS``.
        content: its argument.
        outcome: path of the file to report to.
    """
    request = pickle.dumps((operation, dict(content), outcome))
    # Not ForkingPickler, which would pass a file descriptor between processes that may be strangers.
    return pickle.dumps([("request", torch.frombuffer(bytearray(request), dtype=torch.uint8))])


def apply(model: torch.nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Run one request on this rank's part of the model, and report."""
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
    """Tensors in shared memory, read where they lie."""
    with _blocks.read(content) as tensors:
        _take(model, tensors, content)


def load_cuda_block(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Tensors in the memory of this rank's GPU, shared by the process that owns them."""
    _take(model, open_cuda_block(content, torch.cuda.current_device()), content)
    # The owner reuses the block as soon as this is reported as done.
    torch.cuda.synchronize()


def load_checkpoint(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Tensors in safetensors files: (file, [(name in it, name to load it by)])."""
    _take(model, _from_files(content["files"]), content)


def join_group(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Meet a sender; the engine's ranks follow ``first_rank`` in order."""
    _groups.join(content, rank)


def load_broadcast(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Tensors in one broadcast."""
    _take(model, iter(_groups.receive(content, "cuda")), content)


def leave_group(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Leave a group that may have been joined."""
    _groups.leave(content["name"])


def finish(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """The sync has brought all its weights."""
    _arrival(model, content["sync"]).weights.finish()
    _syncs.clear()


def serve_adapter(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """The sync has brought all of an adapter: see ``adapter.replace``."""
    adapter.replace(_arrival(model, content["sync"]).adapter, content["config"], content["absent"])
    _syncs.clear()


LAST = "finish"
"""The operation that ends a sync of whole weights: what was cached under the old ones goes with it."""
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
    """Tensors that last as long as this call."""
    arrival = _arrival(model, content["sync"])
    if content["adapter"]:
        arrival.adapter.update((name, tensor.to("cpu", copy=True)) for name, tensor in tensors)
    else:
        arrival.weights.give(_with_copies(tensors, content["copies"]))


def _arrival(model: Any, sync: int) -> Arrival:
    """Of this sync; whatever one that failed has left is forgotten."""
    if sync not in _syncs:
        _syncs.clear()
        _syncs[sync] = Arrival(model)
    return _syncs[sync]


def _with_copies(
    tensors: Iterable[tuple[str, Tensor]], copies: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor under its name, and under the names that are tied to it."""
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
