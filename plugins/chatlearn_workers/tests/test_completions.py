from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np

from chatlearn_core.types import Completion, LogprobBasis, SamplingParams, VersionSpan
from chatlearn_workers.blocks import BlockStore
from chatlearn_workers.completions import CompletionPacker, completion_of

SAMPLING = SamplingParams(8)


class Block:
    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays

    def rows(self, name: str, start: int, stop: int) -> Any:
        return self.arrays[name][start:stop]


def completion(name: str, length: int, **more: Any) -> Completion:
    return Completion(
        request_id=name,
        token_ids=np.arange(length),
        logprobs=-np.arange(length, dtype=np.float32),
        basis=SAMPLING.basis,
        finish_reason="stop",
        sampling=SAMPLING,
        version_spans=(VersionSpan(0, length, 4),),
        text=f"{name} said ü",
        num_cached_tokens=3,
        **more,
    )


def packed(completions: list[Completion]) -> tuple[list[Any], dict[str, Any]]:
    packer = CompletionPacker()
    return [packer.add(one, SAMPLING) for one in completions], packer.block()


def test_completions_come_back_as_they_were() -> None:
    before = [
        completion("a", 4),
        completion("b", 0),
        completion("c", 3, raw_logprobs=np.full(3, -0.5, np.float32), token_data={"experts": np.ones((3, 2), np.int8)}),
        replace(completion("e", 2), sampling=SamplingParams(9), basis=LogprobBasis(0.5)),
        completion("d", 2, token_data={"experts": np.zeros((2, 4), np.int8)}),
        replace(completion("f", 0, score=-1.5), text=""),  # of a classifier
    ]
    facts, arrays = packed(before)
    after = BlockStore().get_completions([completion_of(one, Block(arrays), SAMPLING) for one in facts])
    for old, new in zip(before, after, strict=True):
        for name in (
            "request_id",
            "basis",
            "finish_reason",
            "sampling",
            "version_spans",
            "text",
            "num_cached_tokens",
            "score",
        ):
            assert getattr(new, name) == getattr(old, name)
        assert new.token_ids.tolist() == old.token_ids.tolist()
        assert new.logprobs.tolist() == old.logprobs.tolist()
        assert (new.raw_logprobs is None) == (old.raw_logprobs is None)
        assert {k: v.tolist() for k, v in new.token_data.items()} == {k: v.tolist() for k, v in old.token_data.items()}
        assert all(new.token_data[k].shape == old.token_data[k].shape for k in old.token_data)


def test_facts_do_not_grow_with_the_completion() -> None:
    short, long = (len(pickle.dumps(packed([completion("a", length)])[0])) for length in (100, 100_000))
    assert long <= short + 64, "only the numbers in it have more digits"


def test_one_block_holds_them_all() -> None:
    _, arrays = packed([completion("a", 4), completion("b", 6)])
    assert sorted(len(array) for array in arrays.values()) == [10, 10, 2 * len("a said ü".encode())]
