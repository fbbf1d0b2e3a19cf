"""Ranks of a trainer as processes of their own, for the benchmarks that compare trainers and layouts."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.protocols import ModelSource, RoleContext, Trainer

DEADLINE_S = 600.0
TP, PP = "tensor_parallel", "pipeline_parallel"


@dataclass(slots=True, frozen=True)
class Layout:
    """A trainer and how its ranks share the work."""

    name: str
    trainer: str
    world: int
    options: Mapping[str, Any]


ONE_RANK = (
    Layout("fsdp, 1 rank", "fsdp", 1, {}),
    Layout("megatron, 1 rank", "megatron", 1, {}),
    Layout("deepspeed, 1 rank", "deepspeed", 1, {"zero_stage": 2}),
)
TWO_RANKS = (
    Layout("fsdp, 2 ranks", "fsdp", 2, {}),
    Layout("fsdp, Ulysses 2", "fsdp", 2, {"ulysses": 2}),
    Layout("fsdp, TP 2", "fsdp", 2, {TP: 2}),
    Layout("megatron, DP 2", "megatron", 2, {}),
    Layout("megatron, TP 2 with SP", "megatron", 2, {TP: 2, "sequence_parallel": True}),
    Layout("megatron, PP 2", "megatron", 2, {PP: 2}),
    Layout("megatron, CP 2", "megatron", 2, {"context_parallel": 2}),
    Layout("deepspeed, ZeRO-1", "deepspeed", 2, {"zero_stage": 1}),
    Layout("deepspeed, ZeRO-2", "deepspeed", 2, {"zero_stage": 2}),
    Layout("deepspeed, ZeRO-3", "deepspeed", 2, {"zero_stage": 3}),
)
FOUR_RANKS = (Layout("megatron, TP 2 x PP 2", "megatron", 4, {TP: 2, PP: 2}),)


def exports_of(layout: Layout) -> frozenset[str]:
    """The forms in which the layout's trainer streams weights."""
    return frozenset(discover_plugins().select("trainer", layout.trainer).exports)


def run_ranks(
    layout: Layout,
    model: str,
    options: Mapping[str, Any],
    work: Callable[..., dict[str, Any]],
    *arguments: Any,
) -> list[dict[str, Any]]:
    """Set the trainer up on every rank, and return what ``work(trainer, *arguments)`` returns on each.

    Args:
        layout: the trainer and its ranks.
        model: model directory.
        options: options beside the layout's.
        work: a function of a module.
        *arguments: passed on.

    Raises:
        TimeoutError: the ranks need longer than ``DEADLINE_S``.
    """
    return run_processes(_rank, layout.world, layout.name, layout, model, dict(options), work, arguments)


def run_processes(
    target: Callable[..., dict[str, Any]], world: int, name: str, *arguments: Any
) -> list[dict[str, Any]]:
    """Return what ``target(index, directory, *arguments)`` returns in each of ``world`` new processes.

    Args:
        target: a function of a module; ``directory`` is shared by the processes, and deleted after them.
        world: number of processes.
        name: of the work, for the error.
        *arguments: passed on.

    Raises:
        TimeoutError: the processes need longer than ``DEADLINE_S``.
    """
    with tempfile.TemporaryDirectory() as directory:
        processes = torch.multiprocessing.start_processes(
            _save_answer, (target, directory, arguments), world, join=False
        )
        assert processes is not None, "they are not joined yet"
        deadline = time.monotonic() + DEADLINE_S
        while not processes.join(timeout=1.0):
            if time.monotonic() > deadline:
                for process in processes.processes:
                    process.kill()
                raise TimeoutError(f"{name}: the processes did not finish in {DEADLINE_S:.0f} s")
        return [torch.load(f"{directory}/{index}.pt", weights_only=False) for index in range(world)]


def _save_answer(index: int, target: Callable[..., dict[str, Any]], directory: str, arguments: tuple[Any, ...]) -> None:
    torch.save(target(index, directory, *arguments), Path(directory) / f"{index}.pt")


def _rank(
    rank: int,
    directory: str,
    layout: Layout,
    model: str,
    options: dict[str, Any],
    work: Callable[..., dict[str, Any]],
    arguments: tuple[Any, ...],
) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    registry = discover_plugins()
    record = registry.select("trainer", layout.trainer)
    context = RoleContext(
        "trainer",
        ModelSource(model, model),
        rank=rank,
        world_size=layout.world,
        device=device,
        trainable=True,
        rendezvous=f"file://{directory}/rendezvous" if layout.world > 1 else None,
    )
    trainer: Trainer = registry.load_factory(record)(
        registry.load_options(record)(**(options | dict(layout.options))), context
    )
    trainer.setup()
    answer = work(trainer, *arguments)
    trainer.close()
    return answer
