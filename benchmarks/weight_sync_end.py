"""The generator's process of ``weight_sync.py``: every transport's receiver beside one engine, or beside something that
takes and forgets.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from process_costs import Costs
from torch import Tensor
from weight_sync_loopback import receive_pieces
from weight_sync_model import MODEL_LENGTH, MemoryTrainer, own_memory

from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.types import Endpoint, MemoryHandle, SyncOffer, SyncRequest, WeightManifest
from chatlearn_hosting import SharedBlock
from chatlearn_testing.model_directory import manifest_of, read_checkpoint

KV_CACHE_BYTES = 256 << 20
Measured = dict[str, float]


class Forget:
    """A loader that is given everything and does nothing: what remains is the transport."""

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        """Nothing to check."""

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _ in tensors:
            pass

    async def load_handles(self, handle: MemoryHandle) -> None:
        """Nothing to read."""

    async def load_checkpoint(self, directory: Path) -> None:
        """Nothing to read."""

    async def finish(self) -> int:
        return 0


@dataclass
class End:
    """What this process holds."""

    registry: PluginRegistry
    model: Path
    engine: str
    loader: Any
    here: Endpoint
    receivers: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Of the model, once a measurement that needs them in this process has read them."""


def generator_end(pipe: Any, model: str, engine: str, dtype: str, python: str | None) -> None:
    """Answer the trainer's process until it closes. A failure is answered in words."""
    torch.set_num_threads(1)
    asyncio.run(_serve(pipe, Path(model), engine, dtype, python))


async def _serve(pipe: Any, model: Path, engine: str, dtype: str, python: str | None) -> None:
    registry = discover_plugins()
    here = Endpoint("generator", 0, 0, socket.gethostname(), "cpu", os.getpid())
    generator: Any = None
    try:
        if engine:
            generator = started(registry, engine, model, dtype, python)
        end = End(registry, model, engine, generator.loader if generator is not None else Forget(), here)
        pipe.send(here)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    while True:
        message = await asyncio.to_thread(pipe.recv)
        if message[0] == "close":
            break
        try:
            answer = await ANSWERS[message[0]](end, *message[1:])
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pipe.send(answer)
    for receiver in end.receivers.values():
        receiver.close()
    if generator is not None:
        generator.close()


def started(registry: PluginRegistry, engine: str, model: Path, dtype: str, python: str | None) -> Any:
    """A generator that serves the model directory."""
    spec = registry.select("generator", engine, "--engines", installed=None)
    options = registry.load_options(spec)
    own: dict[str, Any] = {"dtype": dtype}
    arguments: dict[str, Any] = {}
    if engine == "vllm":
        arguments = {"kv_cache_memory_bytes": KV_CACHE_BYTES, "max_num_seqs": 8}
    elif engine == "sglang":
        own["python"] = python
        arguments = {"max_total_tokens": MODEL_LENGTH * 4, "max_running_requests": 4}
    context = RoleContext(
        "generator",
        ModelSource(str(model), str(model), max_length=MODEL_LENGTH),
        device="cpu",
        engine_arguments=arguments,
    )
    generator = registry.load_factory(spec)(options(**own), context)
    generator.setup()
    return generator


async def receive(end: End, transport: str, plan: SyncRequest, offer: SyncOffer) -> Measured:
    """One sync, to the confirmed version."""
    receiver = end.receivers.get(transport)
    if receiver is None:
        record = end.registry.select("weight_sync", transport, "transport")
        receiver = end.registry.load_factory(record, "receiver")(end.registry.load_options(record)(), end.here)
        end.receivers[transport] = receiver
    costs = Costs()
    await end.loader.begin(plan.policy_version, plan.manifest)
    num_bytes = await receiver.receive(plan, [offer], end.loader)
    await end.loader.finish()
    return {"bytes": num_bytes, "s": costs.seconds(), "peak_mb": costs.peak_mb(), "cpu_s": costs.cpu_s()}


async def direct(end: End, plan: SyncRequest) -> Measured:
    """One sync over ``direct``, which has both ends in this process."""
    record = end.registry.select("weight_sync", "direct", "transport")
    options = end.registry.load_options(record)()
    sender = end.registry.load_factory(record, "sender")(options, end.here)
    receiver = end.registry.load_factory(record, "receiver")(options, end.here)
    trainer = MemoryTrainer(_tensors(end))
    costs = Costs()
    await end.loader.begin(plan.policy_version, plan.manifest)
    offer = sender.offer(plan)
    thread = threading.Thread(target=sender.send, args=(plan, trainer))
    thread.start()
    num_bytes = await receiver.receive(plan, [offer], end.loader)
    thread.join()
    await end.loader.finish()
    sender.close()
    receiver.close()
    return {"bytes": num_bytes, "s": costs.seconds(), "peak_mb": costs.peak_mb(), "cpu_s": costs.cpu_s()}


async def from_memory(end: End, version: int) -> Measured:
    """The engine takes the same tensors out of memory that it can read: its own process's, or, where it is a process by
    itself, a block that holds all of them before the clock starts.
    """
    tensors = _tensors(end)
    if end.engine != "sglang":
        costs = Costs()
        await end.loader.begin(version, manifest_of(tensors))
        await end.loader.load_tensors(iter(tensors.items()))
        await end.loader.finish()
        return {"s": costs.seconds(), "cpu_s": costs.cpu_s()}
    with SharedBlock(sum(tensor.nbytes + 64 for tensor in tensors.values())) as block:
        for name, tensor in tensors.items():
            assert block.add(name, tensor)
        costs = Costs()
        await end.loader.begin(version, manifest_of(tensors))
        await end.loader.load_handles(block.handle())
        await end.loader.finish()
        return {"s": costs.seconds(), "cpu_s": costs.cpu_s()}


async def loopback(end: End, port: int, num_bytes: int, num_groups: int) -> bool:
    """The receiving end of gloo alone."""
    await asyncio.to_thread(receive_pieces, port, num_bytes, num_groups)
    return True


async def forget(end: End) -> bool:
    """Give back the tensors that this process read for itself."""
    end.tensors = {}
    gc.collect()
    return True


def _tensors(end: End) -> dict[str, Tensor]:
    if not end.tensors:
        end.tensors = own_memory(read_checkpoint(end.model))
    return end.tensors


ANSWERS: dict[str, Any] = {
    "receive": receive,
    "direct": direct,
    "from_memory": from_memory,
    "loopback": loopback,
    "forget": forget,
}
