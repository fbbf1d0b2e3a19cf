from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from chatlearn_core.protocols.lifecycle import ModelSource, RoleContext
from chatlearn_core.testing.model_directory import manifest_of
from chatlearn_core.types import Completion, GenerateRequest, SamplingParams
from chatlearn_hf.tiny import build_tiny_model
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
