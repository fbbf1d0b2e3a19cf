from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from chatlearn_core.types import TrainBatch, cumulative_lengths
from chatlearn_hf.tiny import build_tiny_model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model directory for a family, built once."""
    root = tmp_path_factory.mktemp("models")

    def build(family: str = "qwen3", tie: bool = True) -> Path:
        directory = root / f"{family}-{tie}"
        return directory if directory.exists() else build_tiny_model(directory, family, tie=tie)  # type: ignore[arg-type]

    return build


@pytest.fixture
def make_batch() -> Callable[..., TrainBatch]:
    def make(lengths: Sequence[int] = (17, 40, 1, 7, 38), vocabulary: int = 300) -> TrainBatch:
        """Random tokens, about two thirds of which are learned."""
        count, total, bounds = len(lengths), sum(lengths), cumulative_lengths(list(lengths))
        loss_mask = torch.rand(total, generator=torch.Generator().manual_seed(1)) < 0.67
        loss_mask[bounds[:-1].long()] = False
        return TrainBatch(
            sample_ids=tuple(f"s{i}" for i in range(count)),
            token_ids=torch.randint(0, vocabulary, (total,), generator=torch.Generator().manual_seed(0)),
            cu_seqlens=bounds,
            loss_mask=loss_mask,
            unit_index=torch.arange(count),
            group_index=torch.arange(count),
        )

    return make
