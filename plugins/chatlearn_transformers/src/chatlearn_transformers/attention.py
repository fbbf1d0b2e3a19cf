"""The attention used while generating: torch's fused kernel, with grouped KV heads never repeated when decoding.

transformers repeats the whole KV cache once per query head of a group before every decoding step of every layer. Here
the query heads that share a KV head become the query positions of one attention call instead: the same numbers, and
the cache is only read. It is registered through transformers' public ``AttentionInterface``; a model that runs with it
gets no mask of transformers' own making, so its caller passes one, or None for plain causal attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "chatlearn_slots"

_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window", "cache")
"""Arguments by which a model asks for another attention than softmax(QK)V over all earlier tokens."""


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend.

    Args:
        query: [N, H, L, D]
        key: [N, G, S, D], where G divides H.
        value: [N, G, S, D]
        attention_mask: None: causal over L = S tokens; else [N, 1, 1, S], additive, with L = 1.

    Returns:
        [N, L, H, D]

    Raises:
        NotImplementedError: the model asks for an attention that this one would compute wrongly.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__} asks for {name}={kwargs[name]!r}")
    num_rows, num_heads, num_queries, _ = query.shape
    num_kv_heads = key.shape[1]
    if attention_mask is not None:
        if num_queries != 1:
            raise NotImplementedError(f"a mask is given for {num_queries} queries; only decoding takes one")
        grouped = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, query.shape[-1])
        out = torch.nn.functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, scale=scaling
        )
        return out.reshape(num_rows, 1, num_heads, value.shape[-1]), None
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=num_queries > 1, scale=scaling, enable_gqa=num_heads != num_kv_heads
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, slot_attention)
