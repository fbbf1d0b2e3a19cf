from __future__ import annotations

import pytest
import torch

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import WeightShard
from chatlearn_sync.shard_spec import whole_shard
from chatlearn_sync.stream import StreamCheck, bucket_limit, buckets, name_list


def shard(name, tensor, owner=0):
    return whole_shard(name, tensor, owner)


@pytest.fixture
def ten(make_plan):
    tensors = {f"t{i}": torch.full((4,), float(i)) for i in range(10)}  # 16 bytes each
    return tensors, make_plan(tensors).manifest


def test_buckets_keep_order_and_stay_under_the_limit(ten):
    tensors, manifest = ten
    cut = list(buckets((shard(n, t) for n, t in tensors.items()), 0, StreamCheck(manifest, "here"), 50))
    assert [len(bucket) for bucket in cut] == [3, 3, 3, 1]  # 3 x 16 <= 50 < 4 x 16
    assert [shard.name for bucket in cut for shard in bucket] == list(tensors)


def test_a_tensor_over_the_limit_travels_alone(make_plan):
    tensors = {"small": torch.zeros(2), "large": torch.zeros(100), "last": torch.zeros(2)}
    check = StreamCheck(make_plan(tensors).manifest, "here")
    cut = list(buckets((shard(n, t) for n, t in tensors.items()), 0, check, 16))
    assert [[shard.name for shard in bucket] for bucket in cut] == [["small"], ["large"], ["last"]]


def test_only_the_owner_sends(ten):
    tensors, manifest = ten
    shards = [shard(n, t, owner=i % 2) for i, (n, t) in enumerate(tensors.items())]
    cut = list(buckets(iter(shards), 1, StreamCheck(manifest, "here"), 1 << 20))
    assert [shard.name for shard in cut[0]] == ["t1", "t3", "t5", "t7", "t9"]


def test_three_buffers_fit_into_the_plan(make_plan):
    assert bucket_limit(make_plan({}, bucket_bytes=300)) == 100
    assert bucket_limit(make_plan({}, bucket_bytes=1)) == 1


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("t99", torch.zeros(4), r"here: tensor 't99' is not in the manifest"),
        ("t1", torch.zeros(5), r"'t1' has shape \[5\], the manifest says \[4\]"),
        ("t1", torch.zeros(4, dtype=torch.float64), r"'t1' has dtype float64, the manifest says float32"),
    ],
)
def test_a_tensor_that_is_not_as_promised_is_named(ten, name, tensor, message):
    with pytest.raises(WeightSyncError, match=message):
        StreamCheck(ten[1], "here").admit(shard(name, tensor))


def test_the_same_tensor_twice(ten):
    check = StreamCheck(ten[1], "here")
    check.admit(shard("t1", torch.zeros(4)))
    with pytest.raises(WeightSyncError, match="'t1' was streamed twice"):
        check.admit(shard("t1", torch.zeros(4)))


def test_missing_tensors_are_named(ten):
    check = StreamCheck(ten[1], "here")
    for i in range(8):
        check.admit(shard(f"t{i}", torch.zeros(4)))
    with pytest.raises(WeightSyncError, match="2 of 10 tensors were not streamed: t8, t9"):
        check.complete()


def test_a_tied_alias_may_travel_beside_its_tensor_but_not_instead(make_plan):
    plan = make_plan({"embed": torch.zeros(4)}, {"lm_head": "embed"})
    check = StreamCheck(plan.manifest, "here")
    check.admit(shard("lm_head", torch.zeros(4)))
    with pytest.raises(WeightSyncError, match="not streamed: embed"):
        check.complete()
    check.admit(shard("embed", torch.zeros(4)))
    check.complete()


def test_a_box_is_refused(ten):
    part = WeightShard("t1", (4,), ((0, 2),), 0, torch.zeros(2))
    with pytest.raises(WeightSyncError, match=r"the box \[0:2\] of tensor 't1'.*takes whole tensors"):
        list(buckets(iter([part]), 0, StreamCheck(ten[1], "here"), 100))


def test_long_lists_of_names_are_shortened():
    assert name_list(["a", "b"]) == "a, b"
    assert name_list(list("abcdefg")) == "a, b, c, d, e, and 2 more"
