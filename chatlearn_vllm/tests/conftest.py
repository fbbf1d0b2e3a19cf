from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chatlearn_hf.tiny import build_tiny_model


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
