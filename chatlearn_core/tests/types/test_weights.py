"""A manifest says by name, shape and dtype why weights cannot be loaded."""

from __future__ import annotations

import torch

from chatlearn_core.types import TensorSpec, WeightManifest, WeightShard


def manifest(*specs: tuple[str, tuple[int, ...], str], **aliases: str) -> WeightManifest:
    return WeightManifest({name: TensorSpec(name, shape, dtype) for name, shape, dtype in specs}, aliases)


EMBEDDING = ("embed", (4, 2), "float32")
HEAD = ("head", (4, 2), "float32")


def test_equal_manifests_have_no_differences() -> None:
    assert manifest(EMBEDDING, HEAD).differences(manifest(HEAD, EMBEDDING)) == []


def test_every_difference_is_one_line_with_both_sides() -> None:
    expected = manifest(EMBEDDING, ("norm", (2,), "float32"), ("bias", (3,), "float32"), ("gone", (1,), "float32"))
    offered = manifest(EMBEDDING, ("norm", (3,), "float32"), ("bias", (3,), "bfloat16"), ("odd", (1,), "float32"))
    assert expected.differences(offered) == [
        "bias: dtype bfloat16 offered, float32 expected",
        "gone: expected by the generator, not offered by the trainer",
        "norm: shape [3] offered, [2] expected",
        "odd: offered by the trainer, unknown to the generator",
    ]


def test_dtypes_can_be_left_to_the_loader() -> None:
    assert manifest(EMBEDDING).differences(manifest(("embed", (4, 2), "bfloat16")), check_dtype=False) == []


def test_a_tied_tensor_may_be_offered_under_its_alias_or_not_at_all() -> None:
    tied = manifest(EMBEDDING, head="embed")
    assert tied.differences(manifest(EMBEDDING)) == []
    assert tied.differences(manifest(EMBEDDING, HEAD)) == [], "once more, under the alias"
    assert manifest(EMBEDDING, HEAD).differences(tied) == [], "what is expected twice is offered once"


def test_an_alias_of_another_shape_is_a_difference() -> None:
    tied = manifest(EMBEDDING, head="embed")
    assert tied.differences(manifest(EMBEDDING, ("head", (5, 2), "float32"))) == [
        "head: shape [5, 2] offered, [4, 2] expected"
    ]


def test_elements_of_scalars_and_empty_tensors() -> None:
    assert [TensorSpec("x", shape, "float32").num_elements for shape in ((), (0, 3), (2, 3))] == [1, 0, 6]


def test_a_shard_knows_whether_it_is_the_whole_tensor() -> None:
    def shard(box: tuple[tuple[int, int], ...]) -> WeightShard:
        return WeightShard("w", (4, 2), box, 0, torch.zeros(0))

    assert shard(((0, 4), (0, 2))).is_whole
    assert not shard(((0, 2), (0, 2))).is_whole
