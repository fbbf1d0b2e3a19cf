import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.types import TrainBatch, cumulative_lengths
from chatlearn_trainer_kit.shared_prompts import find_shared_prompts


def batch_of(sequences) -> TrainBatch:
    """From (group, prompt, completion) lists; completions are learned, but for a first token."""
    lengths = [len(prompt) + len(completion) for _, prompt, completion in sequences]
    learned = [[False] * len(p) + [True] * len(c) for _, p, c in sequences]
    for mask in learned:
        mask[:1] = [False] * len(mask[:1])
    return TrainBatch(
        sample_ids=tuple(f"s{i}" for i in range(len(sequences))),
        token_ids=torch.tensor([t for _, p, c in sequences for t in p + c], dtype=torch.int64),
        cu_seqlens=cumulative_lengths(lengths),
        loss_mask=torch.tensor([flag for mask in learned for flag in mask], dtype=torch.bool),
        unit_index=torch.arange(len(sequences)),
        group_index=torch.tensor([group for group, _, _ in sequences], dtype=torch.int64),
    )


def naive_rows(batch: TrainBatch, indices) -> list[int]:
    """A prompt token's row is named by its group and all tokens up to it, any other's by its place."""
    names = {}
    rows = []
    bounds = batch.cu_seqlens.tolist()
    for s in indices:
        ids, mask = batch.token_ids[bounds[s] : bounds[s + 1]].tolist(), batch.loss_mask[bounds[s] : bounds[s + 1]]
        for t in range(len(ids)):
            own = bool(mask[: t + 1].any())
            name = (s, t) if own else (int(batch.group_index[s]), tuple(ids[: t + 1]))
            rows.append(names.setdefault(name, len(names)))
    return rows


tokens = st.lists(st.sampled_from([0, 1, 255, 256, 70_000]), max_size=5)
batches = st.lists(st.tuples(st.integers(0, 2), tokens, tokens), max_size=7).map(batch_of)


def partition_of(rows):
    """Which tokens lie together, whatever the rows' numbers."""
    return {frozenset(k for k, row in enumerate(rows) if row == one) for one in rows}


@given(batch=batches, data=st.data())
def test_rows_are_those_of_equal_beginnings(batch, data) -> None:
    indices = data.draw(st.permutations(range(batch.num_sequences)))
    indices = indices[: data.draw(st.integers(0, len(indices)))]
    expected = naive_rows(batch, indices)
    shared = find_shared_prompts(batch)
    rows = shared.rows(indices) if shared is not None else None
    if rows is None:
        assert len(set(expected)) == len(expected)
    else:
        assert partition_of(rows.tolist()) == partition_of(expected)
        assert set(rows.tolist()) == set(range(len(set(expected))))
    if shared is not None:
        assert shared.num_rows(indices) == len(set(expected))


@given(batch=batches)
def test_common_is_the_equal_beginning_of_two_prompts(batch) -> None:
    shared = find_shared_prompts(batch)
    for pair in itertools.combinations(range(batch.num_sequences), 2):
        expected = len(naive_rows(batch, pair)) - len(set(naive_rows(batch, pair)))
        assert (shared.common(*pair) if shared is not None else 0) == expected


def test_groups_are_candidates_and_tokens_decide() -> None:
    same_group_other_tokens = batch_of([(0, [5, 6], [7]), (0, [6, 6], [7])])
    same_tokens_other_group = batch_of([(0, [5, 6], [7]), (1, [5, 6], [7])])
    assert find_shared_prompts(same_group_other_tokens) is None
    assert find_shared_prompts(same_tokens_other_group) is None


def test_equal_completions_stay_apart() -> None:
    shared = find_shared_prompts(batch_of([(0, [5, 6], [7, 8]), (0, [5, 6], [7, 8])]))
    assert shared.rows([0, 1]).tolist() == [0, 1, 2, 3, 0, 1, 4, 5]


def test_a_prompt_that_continues_another_shares_the_same_tokens() -> None:
    """Turns of one dialogue: each prompt begins with the one before."""
    shared = find_shared_prompts(batch_of([(3, [1, 2, 3], [9]), (3, [1], [9]), (3, [1, 2], [9])]))
    assert shared.rows([0, 1, 2]).tolist() == [2, 4, 0, 1, 2, 3, 2, 4, 5]
    assert shared.rows([1]) is None
