from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from chatlearn_core.types import TrainBatch, cumulative_lengths

MakeBatch = Callable[..., TrainBatch]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """Builds a packed batch from one list of 0/1 mask entries a sequence."""

    def build(masks: Sequence[Sequence[int]], groups: Sequence[int] | None = None) -> TrainBatch:
        lengths = [len(mask) for mask in masks]
        total = sum(lengths)
        return TrainBatch(
            sample_ids=tuple(f"s{i}" for i in range(len(masks))),
            token_ids=torch.arange(total),
            cu_seqlens=cumulative_lengths(lengths),
            loss_mask=torch.tensor([bool(m) for mask in masks for m in mask], dtype=torch.bool),
            unit_index=torch.arange(len(masks)),
            group_index=torch.as_tensor(groups if groups is not None else range(len(masks)), dtype=torch.int64),
        )

    return build
