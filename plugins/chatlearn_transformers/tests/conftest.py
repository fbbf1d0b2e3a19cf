from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from chatlearn_core.protocols.lifecycle import ModelSource, RoleContext
from chatlearn_core.types import Completion, GenerateRequest, SamplingParams
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_transformers.generator import TransformersGenerator
from chatlearn_transformers.options import TransformersGeneratorOptions

MakeGenerator = Callable[..., TransformersGenerator]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``model_dir(family, **config)``: a tiny random model, weights large enough that greedy text does not repeat."""
    built: dict[str, Path] = {}

    def build(family: str = "qwen3", **config: Any) -> Path:
        key = f"{family} {sorted(config.items())}"
        if key not in built:
            config = {"initializer_range": 0.2, "max_length": 128} | config
            built[key] = build_tiny_model(tmp_path_factory.mktemp(family), family, **config)
        return built[key]

    return build


@pytest.fixture
def make_generator(model_dir: Callable[..., Path]) -> Iterator[MakeGenerator]:
    """``make_generator(directory, **options)``: set up, and closed at the end."""
    made: list[TransformersGenerator] = []

    def make(
        directory: Path | None = None, *, engine: dict[str, Any] | None = None, max_length: int | None = None, **options
    ) -> TransformersGenerator:
        path = str(directory or model_dir())
        context = RoleContext(
            "generator", model=ModelSource(path, path, max_length=max_length), engine_arguments=engine or {}
        )
        generator = TransformersGenerator(TransformersGeneratorOptions(**options), context)
        generator.setup()
        made.append(generator)
        return generator

    yield make
    for generator in made:
        generator.close()


@pytest.fixture(scope="session")
def load_model() -> Callable[[Path], Any]:
    """Plain transformers, its eager attention: independent of the code under test."""
    return lambda path: AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="session")
def random_prompts() -> Callable[..., list[np.ndarray]]:
    def make(count: int, *, seed: int = 0, shortest: int = 1, longest: int = 20) -> list[np.ndarray]:
        draw = np.random.default_rng(seed)
        return [draw.integers(3, 300, draw.integers(shortest, longest + 1)) for _ in range(count)]

    return make


@pytest.fixture(scope="session")
def ask() -> Callable[..., GenerateRequest]:
    """``ask(id, prompt, **sampling)``: a request of 12 tokens that no end-of-sequence token cuts short."""

    def make(
        name: str,
        prompt: np.ndarray,
        *,
        resume_from: Completion | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> GenerateRequest:
        params = SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | sampling))
        return GenerateRequest(name, prompt, params, resume_from=resume_from, timeout_s=timeout_s)

    return make


@pytest.fixture(scope="session")
def plain_logits() -> Callable[..., torch.Tensor]:
    """``plain_logits(model, prompt, completion)``: [C, V] that each token was drawn from, by one uncached forward."""

    def compute(model: Any, prompt: np.ndarray, completion: np.ndarray) -> torch.Tensor:
        ids = torch.from_numpy(np.concatenate([prompt, completion]))[None]
        with torch.no_grad():
            return model(input_ids=ids).logits[0, len(prompt) - 1 : -1]

    return compute
