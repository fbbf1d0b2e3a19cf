"""How a batch is cut into micro-batches, with prompts shared and apart."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.types import TrainBatch, cumulative_lengths
from chatlearn_trainer_kit.micro_batching import MicroBatches, join_units
from chatlearn_trainer_kit.shared_prompts import find_shared_prompts


def batch_of(groups, units=None) -> TrainBatch:
    """Groups of (prompt length, completion lengths); the tokens of a group's prompts are a run of its own."""
    pieces, lengths, learned, group_index = [], [], [], []
    for group, (prompt, completions) in enumerate(groups):
        for completion in completions:
            pieces += [torch.full((prompt,), group), torch.arange(completion)]
            learned += [torch.zeros(prompt), torch.arange(completion) > 0]
            lengths.append(prompt + completion)
            group_index.append(group)
    count = len(lengths)
    return TrainBatch(
        sample_ids=tuple(f"s{i}" for i in range(count)),
        token_ids=torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64),
        cu_seqlens=cumulative_lengths(lengths),
        loss_mask=torch.cat(learned).bool() if pieces else torch.zeros(0, dtype=torch.bool),
        unit_index=torch.tensor(units if units is not None else range(count), dtype=torch.int64),
        group_index=torch.tensor(group_index, dtype=torch.int64),
    )


sizes = st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5))


@st.composite
def batches(draw) -> TrainBatch:
    groups = draw(st.lists(sizes, max_size=4))
    count = sum(len(completions) for _, completions in groups)
    return batch_of(groups, draw(st.lists(st.integers(0, 6), min_size=count, max_size=count)))


@given(batch=batches(), budget=st.integers(1, 60))
def test_budget_counts_computed_rows_and_units_stay_whole(batch, budget) -> None:
    cut = MicroBatches(batch, budget, share_prompts=True)
    assert sorted(index for members in cut.cuts for index in members) == list(range(batch.num_sequences))
    units = batch.unit_index
    rows = []
    for members in cut.cuts:
        inside = {int(unit) for unit in units[members]}
        assert sum(int((units == unit).sum()) for unit in inside) == len(members)
        layouts = cut.shared.num_rows(members) if cut.shared is not None else sum(batch.lengths[i] for i in members)
        assert layouts <= budget or len(inside) == 1
        rows.append(layouts)
    assert cut.num_computed_tokens == sum(rows)


@given(batch=batches(), budget=st.integers(1, 60))
def test_joined_units_stay_in_their_group(batch, budget) -> None:
    shared = find_shared_prompts(batch)
    if shared is None:
        return
    units, groups = batch.unit_index.tolist(), batch.group_index.tolist()
    joined, counts = join_units(shared, batch.lengths, units, groups, budget)
    for number in set(joined):
        members = [i for i, one in enumerate(joined) if one == number]
        inside = {units[i] for i in members}
        assert len(inside) == 1 or (
            len({groups[i] for i in members}) == 1 and sum(counts[i] for i in members) <= budget
        )
        assert shared.num_rows(members) <= sum(counts[i] for i in members)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1000, [[0, 1, 2, 3, 4, 5]]),
        # A group counts 8 + 3 * 2 rows and 2 * 8 repeated tokens, an eighth each: 16.
        (16, [[0, 2, 4], [1, 3, 5]]),
        # Two of a group count 8 + 2 * 2 + 1 = 13, the third alone 10.
        (13, [[0, 2], [1, 3], [4], [5]]),
        (1, [[0], [1], [2], [3], [4], [5]]),
    ],
)
def test_a_group_stays_together_as_far_as_the_budget_goes(budget, expected) -> None:
    batch = batch_of([(8, [2, 2, 2]), (8, [2, 2, 2])]).select([0, 3, 1, 4, 2, 5])
    assert MicroBatches(batch, budget, share_prompts=True).cuts == expected


def test_ranks_agree_on_the_largest_number() -> None:
    asked = []

    def agree(count):
        asked.append(count)
        return 3

    cut = MicroBatches(batch_of([(8, [2, 2, 2])]), 1000, share_prompts=True, agree=agree)
    assert asked == [1]
    assert len(cut) == 3
    assert list(cut) == [[0, 1, 2], [], []]
    assert cut.num_filled == 1


def test_without_common_prompts_nothing_changes() -> None:
    batch = batch_of([(8, [2]), (5, [4])])
    on, off = (MicroBatches(batch, 10, share_prompts=share) for share in (True, False))
    assert on.shared is None
    assert on.cuts == off.cuts
    assert all(rows is None for _, rows in on.on(torch.device("cpu")))
