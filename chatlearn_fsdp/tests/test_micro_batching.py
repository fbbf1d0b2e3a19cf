"""Micro-batches with shared prompts, and that a trainer computes the same with and without them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.types import OutputRequest, TrainBatch, cumulative_lengths
from chatlearn_fsdp.micro_batching import MicroBatches, join_units
from chatlearn_hf.shared_prompts import find_shared_prompts
from chatlearn_hf.tiny import build_tiny_model


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
    assert all(layout.row_of_token is None for _, layout in on.on(torch.device("cpu")))


@pytest.fixture(scope="module")
def family_path(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")

    def build(family: str) -> str:
        directory = root / family
        return str(directory if directory.exists() else build_tiny_model(directory, family))

    return build


@pytest.mark.engine
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens_per_micro_batch": 60},
        {"max_tokens_per_micro_batch": 1},
        {"gradient_checkpointing": True, "max_tokens_per_micro_batch": 100, "logits_chunk_tokens": 16},
        {"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}},
    ],
    ids=str,
)
def test_loss_outputs_and_gradients_do_not_depend_on_sharing(
    make_trainer, make_grouped_batch, policy_loss, gradients_of, family_path, family, options
) -> None:
    batch = make_grouped_batch()
    answers = []
    for share in (True, False):
        trainer = make_trainer(path=family_path(family), grad_clip=None, share_prompts=share, **options)
        outputs = trainer.compute(batch, OutputRequest(frozenset({"logprobs", "entropy", "hidden_states"}), 0.7))
        answers.append((outputs, trainer.update(batch, policy_loss), gradients_of(trainer)))
    (ours, metrics, gradients), (plain, expected, apart) = answers
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], atol=2e-5, rtol=0)
    for name in ("loss", "grad_norm"):
        assert metrics[name].value == pytest.approx(expected[name].value, rel=1e-5), name
    for name, gradient in apart.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    assert metrics["perf/tokens"].total == expected["perf/tokens"].total == batch.num_tokens
    assert expected["perf/computed_tokens"].total == batch.num_tokens
    alone = options.get("max_tokens_per_micro_batch") == 1
    assert (metrics["perf/computed_tokens"].total < batch.num_tokens) is not alone


@pytest.mark.engine
@pytest.mark.parametrize(("head", "name"), [("value", "values"), ("reward", "scores")])
def test_other_heads_too(make_trainer, make_grouped_batch, head, name) -> None:
    batch, request = make_grouped_batch(), OutputRequest(frozenset({name}))
    on, off = (make_trainer(head=head, share_prompts=share).compute(batch, request)[name] for share in (True, False))
    torch.testing.assert_close(on, off, atol=1e-5, rtol=0)


@pytest.mark.engine
def test_other_attention_computes_prompts_apart(make_trainer, make_grouped_batch, policy_loss) -> None:
    batch = make_grouped_batch()
    metrics = make_trainer(attention="sdpa").update(batch, policy_loss)
    assert metrics["perf/computed_tokens"].total == batch.num_tokens
