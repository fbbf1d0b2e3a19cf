"""Layouts that a model refuses before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from chatlearn_fsdp.layouts import check_model
from chatlearn_fsdp.options import FSDPOptions

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 96,
}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_sizes_that_divide_heads_and_mlp_fit(size: int) -> None:
    assert check_model(FSDPOptions(tensor_parallel=size), QWEN3, 16) == []


def test_a_size_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    assert check_model(FSDPOptions(tensor_parallel=16), QWEN3, 16) == [
        "tensor_parallel 16 does not divide the model's 8 key-value heads; of 16 ranks it may be 2, 4, 8"
    ]
    assert check_model(FSDPOptions(tensor_parallel=3), QWEN3, 6) == [
        "tensor_parallel 3 does not divide the model's 16 query heads; of 6 ranks it may be 1, 2",
        "tensor_parallel 3 does not divide the model's 8 key-value heads; of 6 ranks it may be 1, 2",
    ]
    [line] = check_model(FSDPOptions(tensor_parallel=4), QWEN3 | {"intermediate_size": 90}, 4)
    assert line == "tensor_parallel 4 does not divide the model's 90 MLP columns; of 4 ranks it may be 1, 2"


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt2", None])
def test_other_architectures_are_not_split(model_type: str | None) -> None:
    config = QWEN3 | {"model_type": model_type}
    [line] = check_model(FSDPOptions(tensor_parallel=2), config, 2)
    assert line.startswith(
        "tensor_parallel 2 splits the layers of llama, mistral, qwen2, qwen3, but the model's type is"
    )
    assert f"{model_type!r}; set tensor_parallel: 1" in line
    assert check_model(FSDPOptions(), config, 2) == []


def test_ulysses_is_checked_too() -> None:
    assert check_model(FSDPOptions(ulysses=3), QWEN3, 6) == [
        "ulysses 3 does not divide the model's 16 query heads; of 6 ranks it may be 1, 2"
    ]
