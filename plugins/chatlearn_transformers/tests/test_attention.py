from __future__ import annotations

import pytest
import torch

from chatlearn_transformers.attention import slot_attention


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
    with pytest.raises(NotImplementedError, match="Module asks for softcap=30"):
        slot_attention(torch.nn.Module(), tensor, tensor, tensor, None, softcap=30)
