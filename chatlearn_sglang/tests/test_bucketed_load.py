"""Buckets for loaders of every habit; each loader here is one that SGLang 0.5.23 has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from chatlearn_sglang.engine_side import bucketed_load
from chatlearn_sglang.engine_side.bucketed_load import BucketedLoad

Named = tuple[str, Tensor]

TENSORS = {
    "embed": torch.arange(64.0),
    "q_a": torch.arange(8.0) + 100,
    "kv_a": torch.arange(6.0) + 200,
    "norm": torch.arange(4.0) + 300,
    "other": torch.arange(16.0) + 400,
}
FUSED = torch.cat([TENSORS["q_a"], TENSORS["kv_a"]])


class Loader:
    """Copies each tensor as it comes (most models), the halves when both are there (DeepSeek)."""

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.num_tensors: list[int] = []

    def load_weights(self, weights: Iterable[Named]) -> None:
        waiting: dict[str, Tensor] = {}
        self.num_tensors.append(0)
        for name, weight in self.listed(weights):
            self.num_tensors[-1] += 1
            if name not in ("q_a", "kv_a"):
                self.parameters[name] = weight.clone()
                continue
            waiting[name] = weight
            if len(waiting) == 2:
                self.parameters["fused"] = torch.cat([waiting.pop("q_a"), waiting.pop("kv_a")])

    def listed(self, weights: Iterable[Named]) -> Iterable[Named]:
        return weights


class Wrapping(Loader):
    """Reads its weights through a generator of its own (DeepSeek, quantised)."""

    def listed(self, weights: Iterable[Named]) -> Iterator[Named]:
        for name, weight in weights:  # noqa: UP028  # what the loop holds on to is the point
            yield name, weight


class Collecting(Loader):
    """Reads them all before it loads one (vision models)."""

    def listed(self, weights: Iterable[Named]) -> Iterable[Named]:
        return list(weights)


def buckets(*names: str) -> Iterator[list[Named]]:
    """Buckets of copies that are overwritten after they were given, as shared memory is; names joined by ``+``."""
    for bucket in names:
        tensors = [(name, TENSORS[name].clone()) for name in bucket.split("+")]
        yield tensors
        for _, tensor in tensors:
            tensor.fill_(-1.0)


@pytest.mark.parametrize("loader", [Loader, Wrapping, Collecting])
@pytest.mark.parametrize(
    "order",
    [
        ("embed+q_a+kv_a+norm+other",),
        ("embed+q_a", "norm", "kv_a+other"),
        ("kv_a", "embed", "norm", "other", "q_a"),
        ("norm+kv_a", "q_a+other", "embed"),
    ],
)
def test_every_parameter_is_loaded_whatever_the_buckets(loader: type[Loader], order: tuple[str, ...]) -> None:
    model = loader()
    load = BucketedLoad(model)
    for bucket in buckets(*order):
        load.give(bucket)
    load.finish()
    assert set(model.parameters) == {"embed", "norm", "other", "fused"}
    assert torch.equal(model.parameters["fused"], FUSED)
    for name in ("embed", "norm", "other"):
        assert torch.equal(model.parameters[name], TENSORS[name])


def test_a_loader_that_keeps_nothing_gets_almost_no_tensor_twice() -> None:
    """A loop holds its last tensor, so a small one goes along."""
    model = Loader()
    load = BucketedLoad(model)
    for bucket in buckets("norm+embed", "other", "embed"):
        load.give(bucket)
    load.finish()
    assert model.num_tensors == [3, 3, 3], "norm again at the end of the first, at both ends of the others"


def test_threads_of_sglang_are_left_out_only_while_it_loads() -> None:
    answers = []

    class Asking(Loader):
        def load_weights(self, weights: Iterable[Named]) -> None:
            answers.append(bucketed_load.in_order(True, torch.zeros(1)))
            super().load_weights(weights)

    BucketedLoad(Asking()).give([("norm", TENSORS["norm"])])
    assert answers == [False]
    assert bucketed_load.in_order(True, torch.zeros(1)) is True
    assert bucketed_load.in_order(False, torch.zeros(1)) is False
