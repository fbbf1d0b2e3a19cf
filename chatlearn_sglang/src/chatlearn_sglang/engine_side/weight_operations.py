"""New weights, as every rank of the engine takes them: SGLang calls ``apply`` as its custom weight loader.

The request comes as a uint8 tensor, since SGLang hands tensors to a loader and nothing else. What it says, each rank
reads by itself: a block of shared memory, a checkpoint, a broadcast. A loader that raises ends SGLang's scheduler, so
the outcome is written to a file that the caller gave, one line a rank.

Tied tensors are loaded under both of their names (``copies``): some models of SGLang 0.5.23 keep a head of their own
although it is tied (Qwen3-MoE), which otherwise stays what it was, without an error; the others skip the second name.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from chatlearn_core.hosting.engine_side.blocks import MappedBlock
from chatlearn_core.hosting.engine_side.cuda_blocks import open_cuda_block
from chatlearn_core.hosting.engine_side.groups import SenderGroup, join, tensors_in

LOADER = f"{__name__}.apply"
"""Import path under which SGLang finds the loader."""

_groups: dict[str, SenderGroup] = {}
"""Groups that this rank has joined; they outlive a sync."""


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
    with MappedBlock(content) as block:
        model.load_weights(_with_copies(block.tensors(), content["copies"]))


def load_cuda_block(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Tensors in the memory of this rank's GPU, shared by the process that owns them."""
    model.load_weights(_with_copies(open_cuda_block(content, torch.cuda.current_device()), content["copies"]))
    # The owner reuses the block as soon as it is told that this is done.
    torch.cuda.synchronize()


def load_checkpoint(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Tensors in safetensors files: (file, [(name in it, name to load it by)])."""
    model.load_weights(_with_copies(_from_files(content["files"]), content["copies"]))


def join_group(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Meet a sender; the engine's ranks follow ``first_rank`` in order."""
    name = content["name"]
    if name not in _groups:
        _groups[name] = join(
            content["address"],
            name,
            content["backend"],
            content["world_size"],
            content["first_rank"] + rank,
            content["timeout_s"],
        )


def load_broadcast(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Tensors in one broadcast; those with an empty name are received and left out."""
    group = _groups[content["group"]]
    device = "cuda" if content["backend"] == "nccl" else "cpu"
    specs = content["tensors"]
    num_bytes = sum(torch.Size(shape).numel() * getattr(torch, dtype).itemsize for _, dtype, shape in specs)
    flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    group.broadcast(flat).wait()
    wanted = ((name, tensor) for name, tensor in tensors_in(flat, specs) if name)
    model.load_weights(_with_copies(wanted, content["copies"]))


def leave_group(model: Any, content: Mapping[str, Any], rank: int) -> None:
    """Leave a group that may have been joined."""
    group = _groups.pop(content["name"], None)
    if group is not None:
        group.close()


OPERATIONS: Mapping[str, Callable[[Any, Mapping[str, Any], int], None]] = {
    "block": load_block,
    "cuda_block": load_cuda_block,
    "checkpoint": load_checkpoint,
    "join": join_group,
    "broadcast": load_broadcast,
    "leave": leave_group,
}


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
