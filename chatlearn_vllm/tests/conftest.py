from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from chatlearn_core.protocols.lifecycle import ModelSource, RoleContext
from chatlearn_core.types import Completion, GenerateRequest, GroupRendezvous, SamplingParams
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_hosting.engine_side.checksums import checksum
from chatlearn_hosting.engine_side.groups import SenderGroup
from chatlearn_testing.model_directory import manifest_of
from chatlearn_vllm.conformance import ENGINE_ARGUMENTS
from chatlearn_vllm.generator import VLLMGenerator
from chatlearn_vllm.options import VLLMGeneratorOptions


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``model_dir(family, **config)``: a tiny random model, weights large enough that greedy text does not repeat."""
    built: dict[tuple[Any, ...], Path] = {}

    def build(family: str = "qwen3", **config: Any) -> Path:
        key = (family, *sorted(config.items()))
        if key not in built:
            config = {"initializer_range": 0.2, "max_length": 128, "hidden": 128} | config
            built[key] = build_tiny_model(tmp_path_factory.mktemp(family), family, **config)
        return built[key]

    return build


@pytest.fixture(scope="session")
def load_model() -> Callable[[Path], Any]:
    """Plain transformers, its eager attention: independent of the code under test."""
    return lambda path: AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="session")
def make_request() -> Callable[..., GenerateRequest]:
    """``make_request(prompt, **sampling)``."""
    return request


@pytest.fixture(scope="session")
def make_replica() -> Callable[..., Any]:
    """``make_replica(directory, engine={...}, **options)``: set up, on an event loop of its own."""

    def make(directory: Path, *, engine: dict[str, Any] | None = None, device: str = "cpu", **options: Any) -> Replica:
        context = RoleContext(
            "generator",
            ModelSource(str(directory), str(directory)),
            device=device,
            engine_arguments=ENGINE_ARGUMENTS | (engine or {}),
        )
        generator = VLLMGenerator(VLLMGeneratorOptions(**({"dtype": "float32"} | options)), context)
        generator.setup()
        return Replica(generator)

    return make


@pytest.fixture(scope="session")
def receive() -> Callable[..., Coroutine[Any, Any, None]]:
    """``await receive(loader, tensors)``: from a sender in this process, see ``receive_broadcasts``."""
    return receive_broadcasts


class Replica:
    """A generator with the event loop that its coroutines run on."""

    def __init__(self, generator: VLLMGenerator) -> None:
        self.generator = generator
        self.loader = generator.loader
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(work, 120))

    def generate(self, prompt: Sequence[int], **sampling: Any) -> Completion:
        return self.run(self.generator.generate(request(prompt, **sampling)))

    def sync(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load whole tensors, the last first, in two parts."""
        version = self.generator.policy_version + 1

        async def load() -> None:
            await self.loader.begin(version, manifest_of(tensors, self.loader.expected_manifest().aliases))
            items = list(tensors.items())[::-1]
            await self.loader.load_tensors(items[::2])
            await self.loader.load_tensors(iter(items[1::2]))
            assert await self.loader.finish() == version

        self.run(load())

    def close(self) -> None:
        self.generator.close()
        self._runner.close()


def request(prompt: Sequence[int], name: str = "request", **fields: Any) -> GenerateRequest:
    """12 tokens that no end-of-sequence token cuts short."""
    own = {key: fields.pop(key) for key in ("resume_from", "timeout_s") if key in fields}
    params = SamplingParams(**({"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | fields))
    return GenerateRequest(name, np.array(prompt, dtype=np.int64), params, **own)


async def receive_broadcasts(
    loader: Any, tensors: Mapping[str, torch.Tensor], group: str = "to-vllm", damaged: str | None = None
) -> None:
    """Broadcast two flat buckets from a thread that stands for the trainer, of which one tensor may be damaged."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    buckets = [list(tensors.items())[::2], list(tensors.items())[1::2]]

    def send() -> None:
        sender = SenderGroup(store, group, "gloo", 1 + loader.num_group_ranks, 0, 20)
        for bucket in buckets:
            flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket])
            sender.broadcast(flat).wait()
        sender.close()

    thread = threading.Thread(target=send)
    thread.start()
    rendezvous = GroupRendezvous(group, f"127.0.0.1:{store.port}", "gloo", 1 + loader.num_group_ranks, 1, 20)
    await loader.join_group(rendezvous)
    await loader.join_group(rendezvous)  # once more does nothing
    for bucket in buckets:
        specs = manifest_of(dict(bucket)).tensors
        sums = [checksum(tensor) + (name == damaged) for name, tensor in bucket]
        await loader.load_broadcast(group, [specs[name] for name, _ in bucket], sums)
    await loader.leave_group(group)
    thread.join()
