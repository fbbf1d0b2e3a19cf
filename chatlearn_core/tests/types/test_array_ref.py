"""References know lengths, are cut and joined, and give no values."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.exceptions import UnfetchedError
from chatlearn_core.types import (
    RAW_BASIS,
    ArrayRef,
    Completion,
    Fill,
    Prompt,
    Rows,
    Sample,
    SamplingParams,
    TensorRef,
    TextRef,
    joined,
    pack_samples,
    per_sequence,
    sample_from_completion,
    sample_with_turn,
    values_of,
)
from chatlearn_core.types.array_ref import cut


class CountingBlock:
    """Counts what is read."""

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays
        self.read = 0

    def rows(self, name: str, start: int, stop: int) -> Any:
        self.read += stop - start
        return self.arrays[name][start:stop]


def stored(values: list[int], block: CountingBlock | None = None, owner: str = "s1", key: str = "token_ids") -> Any:
    array = np.array(values, dtype=np.int64)
    return ArrayRef([Rows(block or CountingBlock(x=array), "x", 0, len(values))], (), np.int64, owner, key)


def completion(block: CountingBlock, request_id: str = "r") -> Completion:
    text: Any = TextRef(Rows(block, "text", 0, len(block.arrays["text"])), request_id)
    token_ids: Any = ArrayRef([Rows(block, "token_ids", 2, 5)], (), np.int64, request_id, "token_ids")
    logprobs: Any = ArrayRef([Rows(block, "logprobs", 2, 5)], (), np.float32, request_id, "logprobs")
    return Completion(
        request_id=request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        basis=RAW_BASIS,
        finish_reason="stop",
        sampling=SamplingParams(4),
        version_spans=(),
        text=text,
    )


@pytest.fixture
def block() -> CountingBlock:
    return CountingBlock(
        token_ids=np.arange(100, 106, dtype=np.int64),
        logprobs=-np.arange(6, dtype=np.float32),
        text=np.frombuffer("año\n".encode(), np.uint8),
    )


pieces = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=5)


@given(pieces, st.integers(0, 30), st.integers(0, 30))
def test_it_is_cut_like_an_array(parts: list[list[int]], start: int, stop: int) -> None:
    plain = np.array([value for part in parts for value in part], dtype=np.int64)
    array = ArrayRef(
        [stored(part).pieces[0] if i % 2 and part else np.array(part, np.int64) for i, part in enumerate(parts)],
        (),
        np.int64,
    )
    assert len(array) == len(plain)
    assert values_of(array.cut(start, stop)).tolist() == plain[start:stop].tolist()
    assert len(array.cut(start, stop)) == len(plain[start:stop])
    assert values_of(array).tolist() == plain.tolist()


def test_shapes_are_known_and_only_the_rows_that_are_needed_are_read() -> None:
    held = CountingBlock(x=np.arange(12))
    part: Any = joined([np.zeros(3, np.int64), cut(stored([0] * 12, held), 2, 8)])
    assert (len(part), part.shape, part.dtype, part.nbytes, part.ndim, part.size) == (9, (9,), np.int64, 72, 1, 9)
    assert part.blocks == [held]
    assert held.read == 0
    assert values_of(part).tolist() == [0, 0, 0, 2, 3, 4, 5, 6, 7]
    assert held.read == 6


USES: dict[str, Callable[[Any], Any]] = {
    "asarray": np.asarray,
    "concatenate": lambda ref: np.concatenate([ref, ref]),
    "where": lambda ref: np.where(ref, 1, 0),
    "mean": np.mean,
    "array plus it": lambda ref: np.zeros(3) + ref,
    "plus": lambda ref: ref + 1,
    "greater": lambda ref: ref > 1,
    "equal": lambda ref: ref == 1,
    "index": lambda ref: ref[0],
    "slice": lambda ref: ref[1:],
    "list": list,
    "in": lambda ref: 3 in ref,
    "truth": bool,
    "tolist": lambda ref: ref.tolist(),
    "sum": lambda ref: ref.sum(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_use_gets_values_and_the_error_says_of_what_and_how_to_get_them(use: Callable[[Any], Any]) -> None:
    held = CountingBlock(x=np.array([3, 1, 2]))
    with pytest.raises(UnfetchedError, match=r"'token_ids' of 's1' are with the worker.*DataStore\.get") as raised:
        use(stored([3, 1, 2], held))
    assert "fields={'token_ids'}" in str(raised.value)
    assert held.read == 0


TENSOR_USES: dict[str, Callable[[Any], Any]] = {
    "torch": torch.abs,
    "tensor plus it": lambda ref: torch.zeros(3) + ref,
    "plus": lambda ref: ref + 1,
    "mask": lambda ref: ref[torch.tensor([True, False, True])],
    "to": lambda ref: ref.to("cpu"),
    "numpy": lambda ref: ref.numpy(),
    "asarray": np.asarray,
    "tolist": lambda ref: ref.tolist(),
}


@pytest.mark.parametrize("use", TENSOR_USES.values(), ids=TENSOR_USES)
def test_nor_of_a_tensor(use: Callable[[Any], Any]) -> None:
    ref = TensorRef([np.array([3]), stored([1, 2])])
    assert (ref.shape, ref.dtype, len(ref), ref.ndim, ref.is_floating_point()) == ((3,), torch.int64, 3, 1, False)
    with pytest.raises(UnfetchedError, match="'token_ids' of 's1'"):
        use(ref)


def test_references_travel() -> None:
    [again] = pickle.loads(pickle.dumps([stored([7])]))
    assert (values_of(again).tolist(), again.owner, again.key) == ([7], "s1", "token_ids")
    tensor = pickle.loads(pickle.dumps(TensorRef([stored([7])])))
    assert values_of(tensor.sequences[0]).tolist() == [7]


def test_plain_arrays_are_joined_as_ever() -> None:
    assert type(joined([np.zeros(1), np.ones(1)])) is np.ndarray
    assert joined([np.zeros(1, np.int32), np.ones(1, np.int32)], np.int64).dtype == np.int64


def test_equal_rows_are_told_by_value_and_number() -> None:
    array = ArrayRef([Fill(-1, 2), np.array([5, 6], np.int32), Fill(3, 4)], (), np.int32)
    assert values_of(array).tolist() == [-1, -1, 5, 6, 3, 3, 3, 3]
    assert values_of(array.cut(1, 6)).tolist() == [-1, 5, 6, 3, 3]
    assert values_of(ArrayRef([Fill(0, 1)], (2,), np.int8)).tolist() == [[0, 0]]


def sample(block: CountingBlock, name: str = "a") -> Sample:
    return sample_from_completion(name, "g", Prompt("p", np.array([1, 2]), "?"), completion(block))


def test_references_of_a_sample_know_the_sample_and_their_field(block: CountingBlock) -> None:
    made: Any = sample(block, "p@0#3")
    assert (made.token_ids.owner, made.token_ids.key) == ("p@0#3", "token_ids")
    for name in ("generator_logprobs", "policy_version"):
        assert (made.token_data[name].owner, made.token_data[name].key) == ("p@0#3", name)
    for what in (lambda: made.text, lambda: str(made.turns[0].text), lambda: made.turns[0].text.strip()):
        with pytest.raises(UnfetchedError, match=r"'text' of 'p@0#3'"):
            what()
    twice: Any = sample_with_turn(made, replace(completion(block), request_id="t"))
    assert (twice.token_ids.owner, twice.token_data["generator_logprobs"].key) == ("p@0#3", "generator_logprobs")
    assert values_of(twice.token_ids).tolist() == [1, 2, 102, 103, 104, 102, 103, 104]
    assert values_of(made.completion_ids).tolist() == [102, 103, 104]


def test_samples_are_made_and_packed_by_reference(block: CountingBlock) -> None:
    made = sample(block)
    batch = pack_samples([made, made]).select([1, 0, 1])
    assert isinstance(batch.token_ids, TensorRef)
    assert (batch.num_tokens, batch.lengths, batch.loss_mask.sum()) == (15, [5, 5, 5], 9)
    assert block.read == 0
    assert [values_of(array).tolist() for array in batch.token_ids.sequences] == [[1, 2, 102, 103, 104]] * 3
    logprobs: Any = batch.token_data["generator_logprobs"]
    assert [values_of(array).tolist() for array in logprobs.sequences] == [[0.0, 0.0, -2.0, -3.0, -4.0]] * 3
    assert logprobs.dtype == torch.float32


def test_a_batch_of_both_kinds_is_packed(block: CountingBlock) -> None:
    made = sample(block)
    mixed: Any = pack_samples([made, replace(made, token_ids=np.arange(5))]).token_ids
    assert [values_of(one).tolist() for one in mixed.sequences] == [[1, 2, 102, 103, 104], [0, 1, 2, 3, 4]]
    assert mixed.select_sequences([]).shape == (0,)


def test_outputs_are_handed_to_sequences_by_reference_if_they_are() -> None:
    held = CountingBlock(x=np.arange(5, dtype=np.float32))
    rows: list[Any] = [ArrayRef([Rows(held, "x", a, b)], (), np.float32) for a, b in ((0, 2), (2, 5))]
    tensor: Any = TensorRef(rows)
    handed: Any = per_sequence(tensor, [2, 3], ["a", "b"], "values")
    assert [(one.owner, one.key, one.pieces) for one in handed] == [
        (name, "values", row.pieces) for name, row in zip("ab", rows, strict=True)
    ]
    assert held.read == 0
    plain = per_sequence(torch.arange(5, dtype=torch.bfloat16), [2, 3], ["a", "b"], "values")
    assert [(array.dtype, array.tolist()) for array in plain] == [(np.float32, [0, 1]), (np.float32, [2, 3, 4])]
