"""What a trainer is offered is checked before a weight is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import TensorSpec, WeightManifest, WeightShard
from chatlearn_trainer_kit.weight_loader import TrainerWeightLoader

OWN = WeightManifest(
    {"a": TensorSpec("a", (4, 2), "float32"), "b": TensorSpec("b", (3,), "float32")}, aliases={"tied": "a"}
)
A, B = torch.arange(8.0).reshape(4, 2), torch.arange(3.0)


class Loader(TrainerWeightLoader):
    """Notes what it is asked to place."""

    def __init__(self) -> None:
        super().__init__("role 'reference' rank 1", OWN)
        self.placed: list[tuple[str, Tensor]] = []
        self.events: list[str] = []

    def _begin(self) -> None:
        self.events.append("begin")

    def _place(self, shard: WeightShard) -> None:
        self.placed.append((shard.name, shard.tensor))

    def _loaded(self) -> None:
        self.events.append("loaded")

    def _finish(self) -> None:
        self.events.append("finish")

    def _fail(self, reason: str) -> None:
        self.events.append(f"fail: {reason}")


def rows(first: int, last: int) -> WeightShard:
    return WeightShard("a", (4, 2), ((first, last), (0, 2)), 0, A[first:last])


async def test_tensors_and_boxes_are_placed_once_and_the_version_is_returned() -> None:
    loader = Loader()
    await loader.begin(3, OWN)
    await loader.load_boxes([rows(2, 4), rows(0, 2)])
    await loader.load_tensors([("b", B)])
    assert await loader.finish() == 3
    assert loader.events == ["begin", "loaded", "loaded", "finish"]
    assert [(name, tuple(tensor.shape)) for name, tensor in loader.placed] == [
        ("a", (2, 2)),
        ("a", (2, 2)),
        ("b", (3,)),
    ]


async def test_a_tied_tensor_may_come_under_either_name_or_both() -> None:
    both = WeightManifest({**OWN.tensors, "tied": TensorSpec("tied", (4, 2), "float32")})
    under_second = WeightManifest({"b": OWN.tensors["b"], "tied": both.tensors["tied"]}, aliases={"a": "tied"})
    for offered, sent in ((both, ["tied", "a", "b"]), (under_second, ["tied", "b"])):
        loader = Loader()
        await loader.begin(1, offered)
        await loader.load_tensors((name, B if name == "b" else A) for name in sent)
        assert await loader.finish() == 1
        assert [name for name, _ in loader.placed] == ["a", "b"]


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (WeightShard("c", (3,), ((0, 3),), 0, B), "c arrived and is no tensor"),
        (WeightShard("b", (4,), ((0, 3),), 0, B), r"b has shape \[3\]"),
        (WeightShard("b", (3,), ((0, 2),), 0, B), r"b has shape \[3\]; box \[0:2\]"),
        (rows(1, 3), "came twice"),
    ],
)
async def test_what_does_not_fit_is_refused(shard: WeightShard, message: str) -> None:
    loader = Loader()
    await loader.begin(1, OWN)
    await loader.load_boxes([rows(0, 2)])
    with pytest.raises(WeightSyncError, match=f"role 'reference' rank 1.*{message}"):
        await loader.load_boxes([shard])
    assert len(loader.placed) == 1
    await loader.fail("it does not fit")
    assert loader.events[-1] == "fail: it does not fit"


async def test_gaps_and_other_models_are_refused() -> None:
    loader = Loader()
    with pytest.raises(WeightSyncError, match="without begin"):
        await loader.load_tensors([("b", B)])
    with pytest.raises(WeightSyncError, match="1 tensors differ"):
        await loader.begin(1, WeightManifest({"a": OWN.tensors["a"]}))
    assert not loader.events
    await loader.begin(1, OWN)
    await loader.load_boxes([rows(0, 2)])
    await loader.load_tensors([("b", B)])
    with pytest.raises(WeightSyncError, match="1 of 2 tensors of step 1 did not arrive whole: a"):
        await loader.finish()
    await loader.fail("gap")
    await loader.begin(2, OWN)
    await loader.fail("nothing arrived")
    assert loader.events.count("fail: gap") == 1
    assert "fail: nothing arrived" not in loader.events, "its weights are whole still"
