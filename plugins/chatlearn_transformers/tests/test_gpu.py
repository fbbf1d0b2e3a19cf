"""What only a CUDA device can show: the same tokens and logprobs there, and memory that is really freed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.types import GenerateRequest
from chatlearn_testing.model_directory import read_checkpoint
from chatlearn_transformers.generator import TransformersGenerator
from chatlearn_transformers.options import TransformersGeneratorOptions

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


@pytest.fixture
def generator(model_dir: Callable[..., Path]) -> Any:
    path = str(model_dir())
    made = TransformersGenerator(
        TransformersGeneratorOptions(dtype="float32"), RoleContext("generator", ModelSource(path, path), device="cuda")
    )
    made.setup()
    yield made
    made.close()


def test_greedy_tokens_equal_transformers(
    generator: TransformersGenerator,
    model_dir: Callable[..., Path],
    load_model: Callable[[Path], Any],
    random_prompts: Callable[..., list[np.ndarray]],
    ask: Callable[..., GenerateRequest],
) -> None:
    model = load_model(model_dir())
    prompts = random_prompts(8, seed=3)

    async def generate() -> list[Any]:
        requests = [ask(f"r{i}", prompt, temperature=0.0) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*(generator.generate(request) for request in requests))

    for prompt, completion in zip(prompts, asyncio.run(generate()), strict=True):
        tokens = torch.as_tensor(np.concatenate([prompt, completion.token_ids]))[None]
        with torch.no_grad():
            logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert completion.token_ids.tolist() == logprobs.argmax(-1).tolist()
        torch.testing.assert_close(torch.as_tensor(completion.logprobs), logprobs.max(-1).values, rtol=0, atol=2e-3)


def test_offload_frees_device_memory(generator: TransformersGenerator, model_dir: Callable[..., Path]) -> None:
    """Beside the weights, torch holds what its matrix library works in, until the process ends."""
    weights = sum(tensor.nbytes for tensor in read_checkpoint(model_dir()).values())
    held = torch.cuda.memory_allocated()
    generator.offload({"weights", "kv_cache"})
    assert held - torch.cuda.memory_allocated() >= weights > 0
    generator.onload({"weights", "kv_cache"})
    assert torch.cuda.memory_allocated() >= held


def test_a_part_frees_as_much_as_it_measured(
    generator: TransformersGenerator,
    random_prompts: Callable[..., list[np.ndarray]],
    ask: Callable[..., GenerateRequest],
) -> None:
    async def generate() -> None:
        await asyncio.gather(*(generator.generate(ask(f"r{i}", p)) for i, p in enumerate(random_prompts(8, seed=4))))

    asyncio.run(generate())
    for part in ("kv_cache", "weights"):
        measured, allocated = generator.live_bytes(part), torch.cuda.memory_allocated()
        generator.offload({part})
        assert generator.live_bytes(part) == 0
        assert allocated - torch.cuda.memory_allocated() >= measured
        assert measured > 0 or part == "kv_cache", "the cache is dropped when nothing runs, the weights never are"
    generator.onload({"weights", "kv_cache"})
    asyncio.run(generate())
