"""Values are got by sample and field, every block once, and nothing that was not asked for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import BackendError, UnfetchedError
from chatlearn_core.protocols import DataStore, PlainData
from chatlearn_core.protocols.data_store import fields_read_by
from chatlearn_core.types import (
    RAW_BASIS,
    ArrayRef,
    Block,
    Completion,
    Prompt,
    Rows,
    Sample,
    SamplingParams,
    TensorRef,
    TextRef,
    pack_samples,
    sample_from_completion,
)


class FarBlock:
    """Arrays that cannot be read before a store brought them."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {
            "token_ids": np.array([4, 5, 6]),
            "logprobs": np.array([-1.0, -2.0, -3.0], np.float32),
            "experts": np.array([1, 0, 1], np.int8),
            "text": np.frombuffer(b"abc", np.uint8),
        }
        self.is_here = False

    def rows(self, name: str, start: int, stop: int) -> Any:
        assert self.is_here, "a row was read of a block that no store brought"
        return self.arrays[name][start:stop]


class CountingStore(DataStore):
    """Notes what is brought, and in which thread."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.threads: list[str] = []

    def bring(self, blocks: Sequence[Block]) -> None:
        self.calls.append(list(blocks))
        self.threads.append(threading.current_thread().name)
        for block in blocks:
            assert isinstance(block, FarBlock)
            block.is_here = True


def completion(block: FarBlock, name: str = "r") -> Completion:
    def ref(key: str) -> Any:
        return ArrayRef([Rows(block, key, 0, 3)], (), block.arrays[key].dtype, name, key)

    text: Any = TextRef(Rows(block, "text", 0, 3), name)
    return Completion(
        request_id=name,
        token_ids=ref("token_ids"),
        logprobs=ref("logprobs"),
        basis=RAW_BASIS,
        finish_reason="stop",
        sampling=SamplingParams(4),
        version_spans=(),
        text=text,
        token_data={"experts": ref("experts")},
    )


def samples(*blocks: FarBlock) -> list[Sample]:
    prompt = Prompt("p", np.array([1, 2]), "?")
    return [sample_from_completion(f"s{i}", "g", prompt, completion(one)) for i, one in enumerate(blocks)]


def test_only_the_fields_that_are_asked_for_are_plain() -> None:
    store, one, shared = CountingStore(), FarBlock(), FarBlock()
    given = samples(one, shared, shared)
    got = store.get(given, {"token_ids", "generator_logprobs"})
    assert store.calls == [[one, shared]], "one call, every block once"
    assert [sample.token_ids.tolist() for sample in got] == [[1, 2, 4, 5, 6]] * 3
    assert got[0].token_data["generator_logprobs"].tolist() == [0.0, 0.0, -1.0, -2.0, -3.0]
    assert isinstance(got[0].token_data["experts"], ArrayRef)
    with pytest.raises(UnfetchedError, match="'text' of 's0'"):
        assert got[0].text
    assert isinstance(given[0].token_ids, ArrayRef), "what was given is as it was"


def test_everything_is_got_without_fields() -> None:
    [got] = CountingStore().get(samples(FarBlock()))
    assert got.text == "abc"
    assert {name: values.tolist() for name, values in got.token_data.items()} == {
        "policy_version": [-1] * 5,
        "generator_logprobs": [0.0, 0.0, -1.0, -2.0, -3.0],
        "experts": [0, 0, 1, 0, 1],
    }
    assert all(type(values) is np.ndarray for values in (got.token_ids, got.loss_mask, *got.token_data.values()))


def test_a_field_that_no_sample_has_is_refused_and_one_that_some_lack_is_not() -> None:
    store, given = CountingStore(), samples(FarBlock(), FarBlock())
    with pytest.raises(
        BackendError, match=r"2 samples .*'s0'.* has the requested field 'valeus'.*available: experts, "
    ):
        store.get(given, {"valeus"})
    assert not store.calls
    del given[1].token_data["experts"]
    assert store.get(given, {"experts"})[0].token_data["experts"].tolist() == [0, 0, 1, 0, 1]
    assert store.get([], {"anything"}) == []


def test_completions_and_tensors() -> None:
    store = CountingStore()
    [got] = store.get_completions([completion(FarBlock())], {"logprobs"})
    assert got.logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert isinstance(got.token_ids, ArrayRef)
    [got] = store.get_completions([completion(FarBlock())])
    assert (got.text, got.token_data["experts"].tolist(), got.raw_logprobs) == ("abc", [1, 0, 1], None)
    ref: Any = ArrayRef([Rows(FarBlock(), "token_ids", 0, 2)], (), np.int64)
    joined: Any = TensorRef([ref, np.array([9])])
    tensors = store.get_tensors({"a": joined, "b": torch.ones(2)})
    assert (tensors["a"].tolist(), tensors["b"].tolist()) == ([4, 5, 9], [1.0, 1.0])


async def test_a_batch_gets_the_fields_that_are_asked_for() -> None:
    store, block = CountingStore(), FarBlock()
    batch = pack_samples(samples(block, block))
    assert await store.aget_batch(batch, ()) is batch
    got = await store.aget_batch(batch, {"token_ids", "loss_mask", "experts"})
    assert store.calls == [[block]]
    assert store.threads != [threading.current_thread().name]
    assert got.token_ids.tolist() == [1, 2, 4, 5, 6] * 2
    assert got.token_data["experts"].tolist() == [0, 0, 1, 0, 1] * 2
    assert isinstance(got.token_data["generator_logprobs"], TensorRef)
    assert isinstance(batch.token_ids, TensorRef), "what was given is as it was"
    with pytest.raises(BackendError, match=r"2 samples .*'s0'.* has the requested field 'valeus'"):
        await store.aget_batch(batch, {"valeus"})
    assert (await store.aget_batch(pack_samples([]), {"anything"})).num_sequences == 0


async def test_an_event_loop_is_not_blocked() -> None:
    store = CountingStore()
    [got] = await store.aget(samples(FarBlock()), {"text"})
    [other] = await store.aget_completions([completion(FarBlock())])
    assert (got.text, other.text) == ("abc", "abc")
    assert len(store.threads) == 2
    assert threading.current_thread().name not in store.threads
    assert (await PlainData().aget([got], {"text"}))[0].text == "abc"


def test_a_store_of_plain_arrays_gives_the_same_arrays() -> None:
    [plain] = CountingStore().get(samples(FarBlock()))
    [again] = PlainData().get([plain])
    assert again.token_ids is plain.token_ids
    assert again.token_data["experts"] is plain.token_data["experts"]
    assert PlainData().get([replace(plain, token_data={})], {"token_ids"})[0].token_data == {}


def test_what_declares_no_fields_reads_none() -> None:
    class Filter:
        reads = ("token_ids", "text")

    assert fields_read_by(Filter()) == {"token_ids", "text"}
    assert fields_read_by(object()) == frozenset()
