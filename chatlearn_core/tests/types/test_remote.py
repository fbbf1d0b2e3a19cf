"""Arrays by reference behave like arrays, and nothing is fetched that nobody looks at."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.types import (
    RAW_BASIS,
    Fill,
    Prompt,
    RemoteArray,
    RemoteCompletion,
    RemoteTensor,
    RemoteText,
    RemoteTurn,
    Rows,
    Sample,
    SamplingParams,
    Turn,
    joined,
    pack_samples,
    per_sequence,
    sample_from_completion,
)


class CountingBlock:
    """Counts what is fetched."""

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays
        self.fetched = 0

    def rows(self, name: str, start: int, stop: int) -> Any:
        self.fetched += stop - start
        return self.arrays[name][start:stop]


def stored(values: list[int], block: CountingBlock | None = None) -> Any:
    array = np.array(values, dtype=np.int64)
    return RemoteArray([Rows(block or CountingBlock(x=array), "x", 0, len(values))], (), np.int64)


def completion(block: CountingBlock) -> RemoteCompletion:
    text: Any = RemoteText(Rows(block, "text", 0, len(block.arrays["text"])))
    return RemoteCompletion(
        request_id="r",
        token_ids=RemoteArray([Rows(block, "token_ids", 2, 5)], (), np.int64),  # type: ignore[arg-type]  # quacks
        logprobs=RemoteArray([Rows(block, "logprobs", 2, 5)], (), np.float32),  # type: ignore[arg-type]  # quacks
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


@given(pieces, st.integers(-8, 30), st.integers(-8, 30))
def test_it_is_cut_like_an_array(parts: list[list[int]], start: int, stop: int) -> None:
    plain = np.array([value for part in parts for value in part], dtype=np.int64)
    array = RemoteArray(
        [stored(part).pieces[0] if i % 2 and part else np.array(part, np.int64) for i, part in enumerate(parts)],
        (),
        np.int64,
    )
    assert len(array) == len(plain)
    assert array[start:stop].tolist() == plain[start:stop].tolist()
    assert len(array[start:stop]) == len(plain[start:stop])
    assert array.tolist() == plain.tolist()


def test_shapes_are_known_without_fetching() -> None:
    held = CountingBlock(x=np.arange(12))
    array = stored([0] * 12, held)
    cut = joined([np.zeros(3, np.int64), array[2:8]])
    assert (len(cut), cut.shape, cut.dtype, cut.nbytes, cut.ndim, cut.size) == (9, (9,), np.int64, 72, 1, 9)
    assert held.fetched == 0
    assert cut.tolist() == [0, 0, 0, 2, 3, 4, 5, 6, 7]
    assert held.fetched == 6, "only the rows that are needed"


def test_whatever_is_done_with_it_is_done_with_its_values() -> None:
    array = stored([3, 1, 2])
    assert (array + 1).tolist() == [4, 2, 3]
    assert (array > 1).any()
    assert array.sum() == 6
    assert array[1] == 1
    assert array[np.array([2, 0])].tolist() == [2, 3]
    assert np.where(array > 1, array, 0).tolist() == [3, 0, 2]
    assert np.concatenate([array, array]).tolist() == [3, 1, 2, 3, 1, 2]
    assert np.asarray(array, dtype=np.float32).dtype == np.float32
    assert list(array) == [3, 1, 2]
    assert pickle.loads(pickle.dumps(stored([7]))).tolist() == [7]


def test_arrays_at_hand_are_joined_as_ever() -> None:
    assert type(joined([np.zeros(1), np.ones(1)])) is np.ndarray
    assert joined([np.zeros(1, np.int32), np.ones(1, np.int32)], np.int64).dtype == np.int64


def test_a_completion_says_its_text_when_asked(block: CountingBlock) -> None:
    by_reference = completion(block)
    assert block.fetched == 0
    assert by_reference.text == "año\n"
    assert replace(by_reference, finish_reason="length").text == "año\n"
    travelled = pickle.loads(pickle.dumps(by_reference))
    assert (travelled.text, travelled.token_ids.tolist()) == ("año\n", [102, 103, 104])
    plain = by_reference.fetch()
    assert type(plain.token_ids) is type(plain.logprobs) is np.ndarray
    assert (plain.text, plain.logprobs.tolist()) == ("año\n", [-2.0, -3.0, -4.0])


def sample(block: CountingBlock) -> Sample:
    return sample_from_completion("a", "g", Prompt("p", np.array([1, 2]), "?"), completion(block))


def test_the_text_of_a_turn_is_fetched_when_it_is_looked_at(block: CountingBlock) -> None:
    made = sample(block)
    assert isinstance(made.turns[0], RemoteTurn)
    assert block.fetched == 0
    assert made.text == "año\n"
    travelled = pickle.loads(pickle.dumps(made.turns[0]))
    assert (type(travelled), travelled.start, travelled.stop, travelled.text) == (RemoteTurn, 2, 5, "año\n")
    assert type(travelled.fetch()) is Turn


def test_equal_rows_are_told_by_value_and_number() -> None:
    array = RemoteArray([Fill(-1, 2), np.array([5, 6], np.int32), Fill(3, 4)], (), np.int32)
    assert array.tolist() == [-1, -1, 5, 6, 3, 3, 3, 3]
    assert array[1:6].tolist() == [-1, 5, 6, 3, 3]
    assert RemoteArray([Fill(0, 1)], (2,), np.int8).tolist() == [[0, 0]]


def test_samples_are_made_and_packed_by_reference(block: CountingBlock) -> None:
    made = sample(block)
    plain = sample_from_completion("a", "g", made.prompt, completion(block).fetch())
    block.fetched = 0
    batch = pack_samples([made, made]).select([1, 0, 1])
    assert isinstance(batch.token_ids, RemoteTensor)
    assert (batch.num_tokens, batch.lengths, batch.loss_mask.sum()) == (15, [5, 5, 5], 9)
    assert block.fetched == 0
    expected = pack_samples([plain, plain]).select([1, 0, 1])
    assert torch.equal(batch.token_ids, expected.token_ids)
    assert torch.equal(batch.token_data["generator_logprobs"], expected.token_data["generator_logprobs"])
    assert batch.token_data["generator_logprobs"].dtype == torch.float32


def test_a_batch_of_both_kinds_is_packed(block: CountingBlock) -> None:
    made = sample(block)
    mixed = pack_samples([made, replace(made, token_ids=np.arange(5))])
    assert mixed.token_ids.tolist() == [1, 2, 102, 103, 104, 0, 1, 2, 3, 4]
    assert mixed.select([]).token_ids.shape == (0,)


def test_a_tensor_by_reference_works_like_any_other() -> None:
    tensor = RemoteTensor([stored([1, 2]), np.array([3])])
    assert isinstance(tensor, torch.Tensor)
    assert (tensor.shape, tensor.dtype, len(tensor)) == ((3,), torch.int64, 3)
    assert (tensor * 2).tolist() == [2, 4, 6]
    assert tensor.tolist() == tensor.numpy().tolist() == [1, 2, 3]
    assert torch.cat([tensor, torch.zeros(1)]).tolist() == [1, 2, 3, 0]
    assert tensor[torch.tensor([True, False, True])].tolist() == [1, 3]
    assert torch.where(tensor > 1, tensor, 0).tolist() == [0, 2, 3]
    assert tensor.to(torch.float64).dtype == torch.float64
    assert pickle.loads(pickle.dumps(tensor)).tolist() == [1, 2, 3]


def test_outputs_are_handed_to_sequences_by_reference_if_they_are() -> None:
    held = CountingBlock(x=np.arange(5, dtype=np.float32))
    rows: list[Any] = [RemoteArray([Rows(held, "x", a, b)], (), np.float32) for a, b in ((0, 2), (2, 5))]
    assert per_sequence(RemoteTensor(rows), [2, 3]) == rows
    assert held.fetched == 0
    plain = per_sequence(torch.arange(5, dtype=torch.bfloat16), [2, 3])
    assert [(array.dtype, array.tolist()) for array in plain] == [(np.float32, [0, 1]), (np.float32, [2, 3, 4])]
