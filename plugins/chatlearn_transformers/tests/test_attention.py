from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import sliding_window_causal_mask_function

from chatlearn_transformers import attention
from chatlearn_transformers.attention import slot_attention, slot_mask


def reference(query, key, value, visible, scale):
    """Attention head by head, in float64."""
    num_rows, num_heads, num_queries, _ = query.shape
    group = num_heads // key.shape[1]
    out = torch.empty(num_rows, num_queries, num_heads, value.shape[-1], dtype=torch.float64)
    for row in range(num_rows):
        for head in range(num_heads):
            scores = query[row, head].double() @ key[row, head // group].double().T * scale
            weights = scores.masked_fill(~visible[row], -torch.inf).softmax(-1)
            out[row, :, head] = weights @ value[row, head // group].double()
    return out


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_decoding_and_prefill_equal_the_definition(num_kv_heads):
    draw = torch.Generator().manual_seed(0)
    key, value = (torch.randn(3, num_kv_heads, 7, 8, generator=draw) for _ in range(2))
    query = torch.randn(3, 6, 7, 8, generator=draw)

    found, _ = slot_attention(torch.nn.Module(), query, key, value, None, scaling=0.3)
    causal = torch.ones(7, 7, dtype=torch.bool).tril().expand(3, 7, 7)
    torch.testing.assert_close(found.double(), reference(query, key, value, causal, 0.3), atol=1e-5, rtol=0)

    visible = torch.arange(7)[None] < torch.tensor([[7], [1], [4]])
    mask = torch.zeros(3, 7).masked_fill(~visible, -torch.inf)[:, None, None]
    one = query[:, :, -1:].transpose(1, 2).contiguous().transpose(1, 2)
    found, _ = slot_attention(torch.nn.Module(), one, key, value, mask, scaling=0.3)
    expected = reference(one, key, value, visible[:, None], 0.3)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_other_kinds_of_attention_are_refused():
    tensor = torch.zeros(1, 1, 1, 4)
    with pytest.raises(NotImplementedError, match="Module requests unsupported position_bias=30"):
        slot_attention(torch.nn.Module(), tensor, tensor, tensor, None, position_bias=30)


@pytest.mark.parametrize("block", [1, 1 << 26])
def test_caps_and_sinks_equal_the_definition(block, monkeypatch):
    monkeypatch.setattr(attention, "_BLOCK_SCORES", block)
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 7, 8, generator=draw)
    key, value = (torch.randn(2, 2, 7, 8, generator=draw) for _ in range(2))
    sinks = torch.randn(6, generator=draw)
    found, _ = slot_attention(torch.nn.Module(), query, key, value, None, scaling=0.5, softcap=1.5, s_aux=sinks)
    for row in range(2):
        for head in range(6):
            for position in range(7):
                scores = query[row, head, position].double() @ key[row, head // 3, : position + 1].double().T * 0.5
                capped = 1.5 * torch.tanh(scores / 1.5)
                weights = capped.exp() / (capped.exp().sum() + sinks[head].double().exp())
                expected = weights @ value[row, head // 3, : position + 1].double()
                torch.testing.assert_close(found[row, position, head].double(), expected, atol=1e-5, rtol=0)


def test_a_mask_of_rows_at_their_own_positions_is_the_models_own_function():
    columns = torch.tensor([5, 2, 9])
    window = sliding_window_causal_mask_function(4)
    mask = slot_mask(3, 1, 12, q_offset=columns, mask_function=window)
    visible = [{2, 3, 4, 5}, {0, 1, 2}, {6, 7, 8, 9}]
    assert mask.shape == (3, 1, 1, 12)
    for row, expected in enumerate(visible):
        assert set((mask[row, 0, 0] == 0).nonzero()[:, 0].tolist()) == expected
        assert torch.isneginf(mask[row, 0, 0]).sum() == 12 - len(expected)
    assert slot_mask(2, 5, 5, mask_function=window, local_size=6) is None, "no prompt is longer than the window"
    assert torch.equal(
        slot_mask(2, 5, 5, mask_function=window, local_size=4)[0, 0] == 0, torch.ones(5, 5).tril().triu(-3) == 1
    )
