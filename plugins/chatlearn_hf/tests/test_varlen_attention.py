import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_core.exceptions import ModelError
from chatlearn_hf import varlen_attention
from chatlearn_hf.varlen_attention import PackedLayout, varlen_attention_forward


class Layer(torch.nn.Module):
    pass


def loop_attention(query, key, value, lengths, window):
    """One sequence, one head at a time, with an explicit mask."""
    outputs, start = [], 0
    groups = query.shape[1] // key.shape[1]
    for length in lengths:
        rows = slice(start, start + length)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        allowed = (distance >= 0) & (distance < (window or length + 1))
        heads = []
        for head in range(query.shape[1]):
            scores = query[0, head, rows] @ key[0, head // groups, rows].T / query.shape[-1] ** 0.5
            heads.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value[0, head // groups, rows])
        outputs.append(torch.stack(heads, 1))
        start += length
    return torch.cat(outputs)[None]


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=8), window=st.sampled_from([None, 1, 5]))
def test_equals_a_loop_over_sequences_and_heads(lengths, window) -> None:
    torch.manual_seed(0)
    total = sum(lengths)
    query, key, value = (torch.randn(1, heads, total, 8, requires_grad=True) for heads in (4, 2, 2))
    layout = PackedLayout(lengths)
    ours, _ = varlen_attention_forward(Layer(), query, key, value, None, packed_layout=layout, sliding_window=window)
    expected = loop_attention(query, key, value, lengths, window)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (query, key, value), upstream),
        torch.autograd.grad(expected, (query, key, value), upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 3])
def test_shared_rows_equal_the_same_tokens_apart(window) -> None:
    """Two sequences with the first three tokens in common, one alone."""
    torch.manual_seed(0)
    rows = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7])
    parts = [torch.randn(1, heads, 8, 8, requires_grad=True) for heads in (4, 2, 2)]
    layout = PackedLayout([5, 4, 2], rows=rows)
    ours, _ = varlen_attention_forward(Layer(), *parts, None, packed_layout=layout, sliding_window=window)
    apart = loop_attention(*(part[:, :, rows] for part in parts), [5, 4, 2], window)
    expected = apart[:, [0, 1, 2, 3, 4, 8, 9, 10]]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad(ours, parts, upstream), torch.autograd.grad(expected, parts, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_flash_gets_sequences_end_to_end(monkeypatch) -> None:
    """The kernel needs CUDA: a stand-in takes what it would get."""
    rows = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7])
    layout = PackedLayout([5, 4, 2], rows=rows)
    parts = [torch.randn(1, heads, 8, 8) for heads in (4, 2, 2)]

    def kernel(query, key, value, layout, scaling, window):
        packed = (part.transpose(0, 1)[None] for part in (query, key, value))
        return loop_attention(*packed, layout.lengths, window)[0]

    expected, _ = varlen_attention_forward(Layer(), *parts, None, packed_layout=layout)
    monkeypatch.setattr(varlen_attention, "_flash_fits", lambda query, value, rule: True)
    monkeypatch.setattr(varlen_attention, "_flash_varlen", kernel)
    ours, _ = varlen_attention_forward(Layer(), *parts, None, packed_layout=layout)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_positions_restart() -> None:
    layout = PackedLayout([3, 1, 2])
    assert layout.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 6]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "packed_layout"),
        ({"packed_layout": PackedLayout([2]), "position_bias": torch.zeros(1)}, "position_bias"),
        ({"packed_layout": PackedLayout([2]), "indices": torch.zeros(1)}, "indices"),
    ],
)
def test_unsupported_attention_is_refused(arguments, reason) -> None:
    rows = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ModelError, match=reason):
        varlen_attention_forward(Layer(), rows, rows, rows, None, **arguments)


def test_a_mask_is_refused() -> None:
    rows = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ModelError, match="no attention mask"):
        varlen_attention_forward(Layer(), rows, rows, rows, torch.ones(1, 2), packed_layout=PackedLayout([2]))
