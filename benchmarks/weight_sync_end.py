"""The generator's process of ``weight_sync.py``: a receiver, and an engine or something that takes and forgets."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.testing.model_directory import read_checkpoint
from chatlearn_core.types import Endpoint, MemoryHandle, SyncOffer, SyncPlan, WeightManifest

Load = Literal["forget", "engine"]


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


def generator_end(pipe: Any, transport: str, load: Load, model: str, engine: str, dtype: str) -> None:
    """Answer the trainer's process until it closes. A failure is answered in words."""
    torch.set_num_threads(1)
    asyncio.run(_serve(pipe, transport, load, model, engine, dtype))


async def _serve(pipe: Any, transport: str, load: Load, model: str, engine: str, dtype: str) -> None:
    registry = discover_plugins()
    record = registry.select("weight_sync", transport, "transport")
    here = Endpoint("generator", 0, 0, socket.gethostname(), "cpu", os.getpid())
    receiver = registry.load_factory(record, "receiver")(registry.load_options(record)(), here)
    generator: Any = None
    loader: Any = Forget()
    if load == "engine":
        spec = registry.select("generator", engine, "engine")
        options = registry.load_options(spec)
        has_dtype = "dtype" in options.model_fields  # otherwise it is an argument of the engine
        context = RoleContext(
            "generator",
            ModelSource(model, model, max_length=512),
            device="cpu",
            engine_arguments={} if has_dtype else {"dtype": dtype},
        )
        generator = registry.load_factory(spec)(options(**({"dtype": dtype} if has_dtype else {})), context)
        generator.setup()
        loader = generator.loader
    held: dict[str, Tensor] = {}
    while True:
        message = await asyncio.to_thread(pipe.recv)
        try:
            answer = await _answer(message, here, receiver, loader, model, held)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        if message[0] == "close":
            receiver.close()
            if generator is not None:
                generator.close()
            return
        pipe.send(answer)


async def _answer(
    message: Sequence[Any], here: Endpoint, receiver: Any, loader: Any, model: str, held: dict[str, Tensor]
) -> Any:
    if message[0] == "ready":
        return here
    if message[0] == "begin":
        plan: SyncPlan = message[1]
        held.clear()
        gc.collect()
        await loader.begin(plan.policy_version, plan.manifest)
        return True
    if message[0] == "receive":
        plan, offer = message[1:]
        return await _receive(plan, offer, receiver, loader)
    if message[0] == "from_memory":
        if not held:
            held |= {name: tensor.clone() for name, tensor in read_checkpoint(Path(model)).items()}
        await loader.begin(1, message[1])
        start, cpu_start = time.perf_counter(), time.process_time()
        await loader.load_tensors(iter(held.items()))
        await loader.finish()
        return time.perf_counter() - start, time.process_time() - cpu_start
    assert message[0] == "close"
    return None


async def _receive(plan: SyncPlan, offer: SyncOffer, receiver: Any, loader: Any) -> dict[str, float]:
    from weight_sync import peak_mb, reset_peak, resident_mb

    reset_peak()
    before, start = resident_mb(), time.process_time()
    num_bytes = await receiver.receive(plan, [offer], loader)
    await loader.finish()
    return {"bytes": num_bytes, "peak_mb": peak_mb() - before, "cpu_s": time.process_time() - start}
