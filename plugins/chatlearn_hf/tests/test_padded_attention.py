from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_hf import padded_attention
from chatlearn_hf.padded_attention import ScoreRule, attend


def by_the_formula(query, key, value, rule: ScoreRule) -> torch.Tensor:
    """One query at a time: cap, mask, softmax with the sink as one more score, weighted values."""
    count, heads, width, size = query.shape
    scaling = rule.scaling if rule.scaling is not None else size**-0.5
    output = query.new_zeros(count, heads, width, value.shape[-1])
    groups = heads // key.shape[1]
    pieces = []
    for n in range(count):
        for h in range(heads):
            for t in range(width):
                first = 0 if rule.window is None else max(0, t - rule.window + 1)
                scores = key[n, h // groups, first : t + 1] @ query[n, h, t] * scaling
                if rule.softcap is not None:
                    scores = rule.softcap * torch.tanh(scores / rule.softcap)
                if rule.sinks is not None:
                    scores = torch.cat([scores, rule.sinks[h : h + 1]])
                weights = scores.softmax(-1)[: t + 1 - first]
                pieces.append(weights @ value[n, h // groups, first : t + 1])
    return torch.stack(pieces).view_as(output)


@settings(max_examples=20, deadline=None)
@given(
    width=st.integers(1, 9),
    window=st.sampled_from([None, 1, 3]),
    softcap=st.sampled_from([None, 0.7]),
    has_sinks=st.booleans(),
    value_size=st.sampled_from([8, 4, 12]),
    scaling=st.sampled_from([None, 0.9]),
)
def test_outputs_and_gradients_are_those_of_the_formula(width, window, softcap, has_sinks, value_size, scaling) -> None:
    generator = torch.Generator().manual_seed(width)
    shapes = [(2, 4, width, 8), (2, 2, width, 8), (2, 2, width, value_size)]
    parts = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    sinks = torch.randn(4, generator=generator, requires_grad=True) if has_sinks else None
    rule = ScoreRule(scaling, window, softcap, sinks)
    ours, theirs = attend(*parts, rule), by_the_formula(*parts, rule)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    inputs = [*parts, *([sinks] if sinks is not None else [])]
    upstream = torch.randn(ours.shape, generator=generator)
    for mine, expected in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 3])
def test_capped_scores_are_computed_in_blocks_that_change_nothing(monkeypatch, window) -> None:
    monkeypatch.setattr(padded_attention, "CAPPED_ROWS", 4)
    torch.manual_seed(0)
    parts = [torch.randn(1, heads, 11, 8, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, requires_grad=True)
    rule = ScoreRule(None, window, 0.7, sinks)
    ours, theirs = attend(*parts, rule), by_the_formula(*parts, rule)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(ours)
    for mine, expected in zip(
        torch.autograd.grad(ours, [*parts, sinks], upstream),
        torch.autograd.grad(theirs, [*parts, sinks], upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)
