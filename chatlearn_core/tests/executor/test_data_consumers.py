"""What the executor does with values asks the store for them: once, for exactly the fields that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import FlowError, PluginError, UnfetchedError
from chatlearn_core.executor.advantages import AdvantageComputer
from chatlearn_core.executor.decisions import Decisions
from chatlearn_core.executor.rollout_buffer import RolloutBuffer
from chatlearn_core.executor.rollout_producer import make_requests
from chatlearn_core.executor.rollouts.pending import Progress, groups_of, with_values
from chatlearn_core.executor.step_samples import FinishedGroup
from chatlearn_core.metrics.run_directory import recorded_fields, rollout_record
from chatlearn_core.protocols import DataStore
from chatlearn_core.types import (
    RAW_BASIS,
    ArrayRef,
    Block,
    Completion,
    Derived,
    ExampleDraw,
    Metric,
    Prompt,
    Rows,
    Sample,
    SamplingParams,
    TextRef,
    TrainBatch,
    VersionSpan,
    sample_from_completion,
)

PROMPT = Prompt("p", np.array([1, 2]), "?")


class FarBlock:
    def __init__(self, first: int) -> None:
        self.arrays: dict[str, Any] = {
            "token_ids": np.array([first, 5, 6]),
            "logprobs": np.array([-1.0, -2.0, -3.0], np.float32),
            "text": np.frombuffer(b"abc", np.uint8),
        }
        self.reads: list[str] = []

    def rows(self, name: str, start: int, stop: int) -> Any:
        self.reads.append(name)
        return self.arrays[name][start:stop]


class CountingStore(DataStore):
    def __init__(self) -> None:
        self.calls: list[int] = []

    def bring(self, blocks: Sequence[Block]) -> None:
        self.calls.append(len(blocks))


def completion(name: str, block: FarBlock) -> Completion:
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
        version_spans=(VersionSpan(0, 3, 0),),
        text=text,
    )


def samples(*blocks: FarBlock) -> list[Sample]:
    return [sample_from_completion(f"s{i}", "g", PROMPT, completion(f"s{i}", one)) for i, one in enumerate(blocks)]


class Repeated:
    """Leaves out what begins with 7."""

    def __init__(self, reads: frozenset[str]) -> None:
        self.reads = reads

    def excluded(self, samples: Sequence[Sample]) -> Mapping[str, str]:
        return {sample.id: "seven" for sample in samples if sample.completion_ids[0] == 7}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Policy:
    async def derive(self, batch: TrainBatch, function: Any, split: str) -> Derived:
        return Derived()


async def excluded(store: DataStore, given: list[Sample], *reads: str) -> None:
    class NoAdvantages:
        advantage_split = "group"

        def advantages(self, batch: TrainBatch, step: int) -> Derived:
            raise AssertionError("the policy computes them")

    decisions = Decisions({"rollout.filters.0": Repeated(frozenset(reads))})
    policy: Any = Policy()
    algorithm: Any = NoAdvantages()
    await AdvantageComputer(algorithm, lambda: policy, decisions, store).add(given, 1)


async def test_a_filter_sees_the_values_that_it_names_and_no_others() -> None:
    store, blocks = CountingStore(), [FarBlock(7), FarBlock(4)]
    given = samples(*blocks)
    await excluded(store, given, "token_ids")
    assert [sample.exclusion for sample in given] == ["seven", None]
    assert store.calls == [2], "one call for all samples"
    assert [block.reads for block in blocks] == [["token_ids"], ["token_ids"]]
    assert all(isinstance(sample.token_ids, ArrayRef) for sample in given), "what is trained on stays where it is"


@pytest.mark.parametrize(
    ("derived", "problem"),
    [
        ({"advantages": torch.zeros(6)}, "returned a dict; they return Derived"),
        (Derived({"advantages": [0.0] * 6}), "returned 'advantages' as a list; data are tensors"),  # type: ignore[dict-item]
        (Derived({"advantages": torch.full((6,), torch.nan)}), "returned 'advantages' with a value that is not finite"),
        (Derived({3: torch.zeros(6)}), "returned 3 as a Tensor"),  # type: ignore[dict-item]
        (Derived(exclusions={"s0": None}), "exclude sample 's0' for the reason None"),  # type: ignore[dict-item]
        (Derived(metrics={"spread": 0.5}), "reported 'spread', which is no Metric"),  # type: ignore[dict-item]
        (Derived(metrics={"spread": Metric(float("inf"))}), "reported spread = inf; a metric is finite"),
    ],
)
async def test_what_an_algorithm_derives_is_checked(derived: Any, problem: str) -> None:
    class Group:
        async def derive(self, batch: TrainBatch, function: Any, split: str) -> Any:
            return derived

    group: Any = Group()
    algorithm: Any = SimpleNamespace(advantage_split="group", advantages=lambda batch, step: derived)
    with pytest.raises(FlowError, match=f"advantages of SimpleNamespace {problem}"):
        await AdvantageComputer(algorithm, lambda: group).add(samples(FarBlock(7)), 1)


async def test_a_filter_that_names_no_field_is_told_what_is_missing() -> None:
    store = CountingStore()
    with pytest.raises((PluginError, UnfetchedError), match=r"'token_ids' of 's0'.*`reads`"):
        await excluded(store, samples(FarBlock(7)))
    assert store.calls == []


async def test_what_a_checkpoint_stores_is_brought_at_once() -> None:
    store, blocks = CountingStore(), [FarBlock(3), FarBlock(4)]
    requests = make_requests([ExampleDraw(PROMPT, 0, "p@0")], 2, SamplingParams(4), seed=0)
    for request, sample in zip(requests, samples(*blocks), strict=True):
        request.sample = sample
    buffer = RolloutBuffer(0)
    buffer.admit([FinishedGroup(tuple(requests))])
    stored = (await buffer.with_values(store)).state_dict()["groups"][0]["samples"]
    assert store.calls == [2]
    assert [one["token_ids"].tolist() for one in stored] == [[1, 2, 3, 5, 6], [1, 2, 4, 5, 6]]
    assert [one["turns"][0]["text"] for one in stored] == ["abc", "abc"]
    assert isinstance(buffer.groups[0].samples[0].token_ids, ArrayRef), "the buffer itself goes on with references"


async def test_pending_rollouts_are_brought_at_once() -> None:
    store = CountingStore()
    requests = make_requests([ExampleDraw(PROMPT, 0, "p@0")], 3, SamplingParams(4), seed=0)
    [group] = groups_of(requests)
    group.progress = [Progress(completion("a", FarBlock(3))), Progress(completion("b", FarBlock(4))), Progress()]
    [kept] = await with_values([group], store)
    assert store.calls == [2]
    found = [None if one.completion is None else one.completion.token_ids.tolist() for one in kept.progress]
    assert found == [[3, 5, 6], [4, 5, 6], None]


def test_a_line_of_rollouts_needs_no_other_fields_than_it_says() -> None:
    store, block = CountingStore(), FarBlock(3)
    given = samples(block)
    fields = recorded_fields(given)
    assert fields == {"token_ids", "text", "generator_logprobs"}
    [plain] = store.get(given, fields)
    record = rollout_record(1, plain)
    assert (record["token_ids"], record["completion"], record["generator_logprobs"]) == (
        [3, 5, 6],
        "abc",
        [-1.0, -2.0, -3.0],
    )
    assert isinstance(plain.token_data["policy_version"], ArrayRef)
