"""The endless stream of examples: epochs, ratios, resuming."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.data import Dataset, DatasetReport
from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.types import Demonstration, Prompt
from chatlearn_data.shuffled_sampler import ShuffledSampler


def dataset(name: str, size: int, weight: float = 1.0, first_token: int = 0) -> Dataset:
    prompts = tuple(Prompt(f"{name}/{i}", np.array([first_token, i], dtype=np.int64), "") for i in range(size))
    return Dataset(name, weight, prompts, DatasetReport(name, name, "plain", size, size, 0, 9, 2))


def ids(batch: list[Any]) -> list[str]:
    return [draw.example.id for draw in batch]


SETS = st.lists(st.tuples(st.integers(1, 7), st.sampled_from([0.5, 1.0, 3.0])), min_size=1, max_size=3).map(
    lambda pairs: [dataset(f"set{i}", size, weight) for i, (size, weight) in enumerate(pairs)]
)


@given(st.integers(1, 30), st.integers(0, 5), st.booleans())
def test_an_epoch_holds_every_example_once(size: int, seed: int, shuffle: bool) -> None:
    data = dataset("a", size)
    sampler = ShuffledSampler([data], seed=seed, shuffle=shuffle)
    for _ in range(3):
        epoch = ids(sampler.next_batch(size))
        assert sorted(epoch) == sorted(prompt.id for prompt in data.examples)
        if not shuffle:
            assert epoch == [prompt.id for prompt in data.examples]


@given(SETS, st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(0, 3), st.data())
def test_resumed_anywhere_it_continues_as_if_never_stopped(
    sets: list[Dataset], sizes: list[int], seed: int, data: st.DataObject
) -> None:
    whole = ShuffledSampler(sets, seed=seed)
    expected = [ids(whole.next_batch(size)) for size in sizes]
    stop = data.draw(st.integers(0, len(sizes) - 1))
    before = ShuffledSampler(sets, seed=seed)
    for size in sizes[:stop]:
        before.next_batch(size)
    state = json.loads(json.dumps(before.state_dict()))
    after = ShuffledSampler(sets, seed=seed)
    after.next_batch(3)
    after.load_state_dict(state)
    assert [ids(after.next_batch(size)) for size in sizes[stop:]] == expected[stop:]
    assert after.state_dict() == whole.state_dict()


@given(SETS, st.integers(1, 40))
def test_the_stream_does_not_depend_on_batch_sizes(sets: list[Dataset], total: int) -> None:
    one_by_one = ShuffledSampler(sets, seed=1)
    at_once = ShuffledSampler(sets, seed=1)
    stream = [one_by_one.next_batch(1)[0].example.id for _ in range(total)]
    assert ids(at_once.next_batch(total)) == stream


@given(SETS, st.integers(1, 40))
def test_groups_and_seeds_are_unique_in_a_run(sets: list[Dataset], size: int) -> None:
    sampler = ShuffledSampler(sets, seed=0)
    draws = [draw for _ in range(3) for draw in sampler.next_batch(size)]
    assert len({draw.group_id for draw in draws}) == len({draw.seed_key for draw in draws}) == 3 * size


def test_draws_of_an_example_are_numbered() -> None:
    data = dataset("a", 1)
    sampler = ShuffledSampler([data], seed=0)
    draws = [*sampler.next_batch(3), *sampler.next_batch(1)]
    assert [draw.group_id for draw in draws] == ["a/0@0", "a/0@1", "a/0@2", "a/0@3"]
    assert [draw.seed_key for draw in draws] == ["a/0@1", "a/0~2@1", "a/0~3@1", "a/0@2"]
    assert all(draw.example is data.examples[0] for draw in draws)
    shown = Dataset("a", 1.0, (Demonstration(data.examples[0].prompt, np.array([5])),), data.report)
    assert [draw.group_id for draw in ShuffledSampler([shown], seed=0).next_batch(2)] == ["a/0@0", "a/0@1"]


def test_several_datasets_are_mixed_by_ratio_each_wrapping_on_its_own() -> None:
    sampler = ShuffledSampler([dataset("small", 2, 3.0), dataset("large", 50, 1.0)], seed=0)
    drawn = [sampler.next_batch(1)[0].example.id for _ in range(40)]
    assert Counter(name.split("/")[0] for name in drawn) == {"small": 30, "large": 10}
    assert Counter(name for name in drawn if "small" in name) == {"small/0": 15, "small/1": 15}
    assert len({name for name in drawn if "large" in name}) == 10
    assert sampler.epochs == {"small": 15.0, "large": 0.2}


def test_seed_epoch_and_dataset_change_the_order() -> None:
    def order(seed: int, name: str = "a", skip: int = 0) -> list[str]:
        sampler = ShuffledSampler([dataset(name, 20)], seed=seed)
        for _ in range(skip):
            sampler.next_batch(20)
        return [prompt_id.split("/")[1] for prompt_id in ids(sampler.next_batch(20))]

    assert order(0) == order(0)
    assert len({tuple(o) for o in (order(0), order(1), order(0, "b"), order(0, skip=1))}) == 4


def test_the_order_is_the_same_in_every_version() -> None:
    """Recorded once; a change here breaks resuming of every run that exists."""
    assert ids(ShuffledSampler([dataset("a", 6)], seed=0).next_batch(6)) == ["a/1", "a/2", "a/5", "a/4", "a/3", "a/0"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ([dataset("a", 6), dataset("b", 4)], ["number of datasets: 1", "2 now"]),
        ([dataset("a", 5)], ["size of dataset 'a': 6 in the checkpoint, 5 now"]),
        ([dataset("a", 6, first_token=7)], ["fingerprint of dataset 'a'"]),
        ([dataset("a", 6, weight=2.0)], ["weight of dataset 'a': 1.0 in the checkpoint, 2.0 now"]),
        ([dataset("c", 6)], ["'a' in the checkpoint, 'c' now"]),
    ],
)
def test_a_state_of_other_data_is_refused(changed: list[Dataset], words: list[str]) -> None:
    state = ShuffledSampler([dataset("a", 6)], seed=0).state_dict()
    sampler = ShuffledSampler(changed, seed=0)
    with pytest.raises(CheckpointError) as caught:
        sampler.load_state_dict(state)
    assert all(word in str(caught.value) for word in words), caught.value
    assert all(drawn == 0 for drawn in sampler.epochs.values())


def test_a_state_of_another_seed_or_order_is_refused() -> None:
    state = ShuffledSampler([dataset("a", 6)], seed=0).state_dict()
    with pytest.raises(CheckpointError, match="seed: 0 in the checkpoint, 1 now"):
        ShuffledSampler([dataset("a", 6)], seed=1).load_state_dict(state)
    with pytest.raises(CheckpointError, match="shuffle: True in the checkpoint, False now"):
        ShuffledSampler([dataset("a", 6)], seed=0, shuffle=False).load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"datasets": 3}, {"datasets": [{}], "version": 1, "seed": 0, "shuffle": True}])
def test_a_damaged_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        ShuffledSampler([dataset("a", 6)], seed=0).load_state_dict(state)
