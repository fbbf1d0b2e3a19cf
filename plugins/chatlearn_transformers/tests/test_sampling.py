from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_transformers.sampling import SamplingPlan, keep_top, sample, seed_word, uniforms

VOCAB = 40


def plan_of(rows: list[tuple[float, float, int]], vocab: int = VOCAB) -> SamplingPlan:
    temperature, top_p, top_k = zip(*rows, strict=True)
    return SamplingPlan.build(
        np.array(temperature, np.float32),
        np.array(top_p, np.float32),
        np.array(top_k, np.int64),
        vocab,
        torch.device("cpu"),
    )


def numbers_of(count: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(uniforms(np.full(count, seed, np.uint64), np.arange(count)))


def reference_distribution(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """One row in float64, token by token, from the definitions."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    kept = order[: top_k or len(order)]
    weights = {token: np.exp(scaled[token] - scaled[order[0]]) for token in kept}
    total, mass, nucleus = sum(weights.values()), 0.0, []
    for token in kept:
        if mass >= top_p * total and nucleus:
            break
        nucleus.append(token)
        mass += weights[token]
    probabilities = np.zeros(len(scaled))
    for token in nucleus:
        probabilities[token] = weights[token] / mass
    return probabilities


def test_splitmix64_reference_sequence():
    # First outputs of splitmix64 from state 0, from the reference C code (Vigna, prng.di.unimi.it).
    from chatlearn_transformers.sampling import _GOLDEN, _mix

    states = np.arange(1, 4, dtype=np.uint64) * _GOLDEN
    assert [hex(x) for x in _mix(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_uniforms_are_uniform_and_uncorrelated():
    count = 1 << 16
    by_position = uniforms(np.full(count, 7, np.uint64), np.arange(count))
    by_seed = uniforms(np.arange(count).astype(np.uint64), np.zeros(count, np.int64))
    for numbers in (by_position, by_seed):
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        observed = np.histogram(numbers, bins=64, range=(0, 1))[0]
        chi_square = ((observed - count / 64) ** 2 / (count / 64)).sum()
        assert chi_square < 103.4  # 99.9% quantile of chi-square with 63 degrees of freedom
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / np.sqrt(count)


def test_uniforms_depend_on_seed_and_position_alone():
    seeds = np.array([seed_word(s) for s in (-1, 5, 2**70 + 3, 5)], np.uint64)
    together = uniforms(seeds, np.array([0, 9, 4, 8]))
    assert together[1] == uniforms(seeds[1:2], np.array([9]))[0]
    assert len(set(together)) == 4


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, VOCAB, VOCAB + 5]),
)
def test_sampled_logprob_is_of_the_cut_distribution(seed, temperature, top_p, top_k):
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    drawn = sample(logits, plan_of([(temperature, top_p, top_k)] * 6), numbers_of(6, seed))
    for row in range(6):
        expected = reference_distribution(logits[row].numpy(), temperature, top_p, top_k)
        token = int(drawn.token_ids[row])
        assert expected[token] > 0
        assert float(drawn.logprobs[row]) == pytest.approx(np.log(expected[token]), abs=1e-4)
        raw = torch.log_softmax(logits[row].double(), -1)[token]
        assert float(drawn.raw_logprobs[row]) == pytest.approx(float(raw), abs=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 0.8, 0), (1.3, 1.0, 5), (1.0, 0.9, 6)]
)
def test_frequencies_follow_the_distribution(temperature, top_p, top_k):
    count, vocab = 20000, 12
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    plan = plan_of([(temperature, top_p, top_k)] * count, vocab)
    tokens = sample(row.expand(count, vocab), plan, numbers_of(count)).token_ids
    expected = reference_distribution(row.numpy(), temperature, top_p, top_k) * count
    observed = np.bincount(tokens.numpy(), minlength=vocab)
    assert observed[expected == 0].sum() == 0
    inside = expected > 0
    chi_square = ((observed[inside] - expected[inside]) ** 2 / expected[inside]).sum()
    assert chi_square < 31.3  # 99.9% quantile of chi-square with 11 degrees of freedom


def test_rows_of_different_kinds_do_not_influence_each_other():
    kinds = [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.5, 0.7, 0), (2.0, 1.0, 4), (1.0, 0.3, 9)]
    logits = torch.randn(len(kinds), VOCAB, generator=torch.Generator().manual_seed(0))
    numbers = numbers_of(len(kinds))
    together = sample(logits, plan_of(kinds), numbers)
    for row, kind in enumerate(kinds):
        alone = sample(logits[row : row + 1], plan_of([kind]), numbers[row : row + 1])
        assert together.token_ids[row] == alone.token_ids[0]
        torch.testing.assert_close(together.logprobs[row], alone.logprobs[0])
    assert together.token_ids[0] == logits[0].argmax()
    assert together.logprobs[0] == together.raw_logprobs[0]


def test_chunks_change_nothing(monkeypatch):
    kinds = [(0.0, 1.0, 0), (1.0, 0.5, 0), (0.5, 1.0, 0), (2.0, 1.0, 4), (1.0, 0.3, 9)]
    logits = torch.randn(len(kinds), VOCAB, generator=torch.Generator().manual_seed(1))
    whole = sample(logits, plan_of(kinds), numbers_of(len(kinds)))
    monkeypatch.setattr("chatlearn_transformers.sampling._CHUNK_ELEMENTS", 2 * VOCAB)
    parts = sample(logits, plan_of(kinds), numbers_of(len(kinds)))
    assert torch.equal(whole.token_ids, parts.token_ids)
    torch.testing.assert_close(whole.logprobs, parts.logprobs)


def test_extreme_uniforms_never_draw_an_impossible_token():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, 4)
    numbers = torch.tensor([0.0, 1.0 - 2.0**-48], dtype=torch.float64)
    assert sample(logits, plan_of([(1.0, 1.0, 0)] * 2, 4), numbers).token_ids.tolist() == [1, 2]


def test_ties_at_the_cut_are_kept_whole():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    kept = keep_top(logits, torch.tensor([2]), torch.tensor([[1.0]]), 2)
    assert torch.isfinite(kept).tolist() == [[True, True, True, False]]


def test_logits_that_are_not_finite_show_in_the_logprob():
    logits = torch.full((1, 4), torch.nan)
    assert not torch.isfinite(sample(logits, plan_of([(1.0, 1.0, 0)], 4), numbers_of(1)).raw_logprobs).any()
