"""Attention and masks for generation, where every row of a batch has its own position.

transformers builds masks from one position for the whole batch. Here the model's own mask functions (causal, sliding
window, chunks) are evaluated at each row's position, so a window is always the model's own.

``chatlearn_slots`` uses torch's fused kernel. transformers copies the whole KV cache for each query head of a group, in
every layer and decoding step. Here the query heads that share a KV head become the query positions of one attention
call, which gives the same numbers and only reads the cache. ``chatlearn_slots_eager`` is the model's own eager
attention with the same masks.

Both are registered through transformers' public ``AttentionInterface`` and ``AttentionMaskInterface``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "chatlearn_slots"
EAGER_NAME = "chatlearn_slots_eager"

_UNSUPPORTED = ("position_bias", "cache")
"""Arguments that request an attention variant which these functions do not compute."""
_BLOCK_SCORES = 1 << 26
"""Number of attention scores held at once without a fused kernel: 256 MiB in float32."""

Mask = Tensor | None


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention.

    Args:
        module: for messages.
        query: [N, H, L, D]
        key: [N, G, S, D], where G divides H.
        value: [N, G, S, D]
        attention_mask: additive, [N, 1, L, S]; None: causal over L = S tokens.
        dropout: ignored, because generation has none.
        scaling: factor on the scores; None is 1 / sqrt(D).
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        s_aux: [H] additional scores in the softmax that attend to nothing (sinks of gpt-oss).
        **kwargs: other arguments of the layer. A window is already in the mask.

    Returns:
        [N, L, H, D]

    Raises:
        NotImplementedError: the model requests an attention variant that this function would compute wrongly.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__} requests unsupported {name}={kwargs[name]!r}")
    if softcap is not None or s_aux is not None:
        return _explicit_attention(query, key, value, attention_mask, scaling, softcap, s_aux), None
    num_rows, num_heads, num_queries, _ = query.shape
    num_kv_heads = key.shape[1]
    if attention_mask is not None and num_queries == 1:
        grouped = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, query.shape[-1])
        out = torch.nn.functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, scale=scaling
        )
        return out.reshape(num_rows, 1, num_heads, value.shape[-1]), None
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None and num_queries > 1,
        scale=scaling,
        enable_gqa=num_heads != num_kv_heads,
    )
    return out.transpose(1, 2).contiguous(), None


def own_eager_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Call the eager attention function of the module's source file.

    Raises:
        NotImplementedError: the file has none.
    """
    attend: Callable[..., tuple[Tensor, Tensor | None]] | None = getattr(
        sys.modules[type(module).__module__], "eager_attention_forward", None
    )
    if attend is None:
        raise NotImplementedError(f"the file of {type(module).__name__} has no eager_attention_forward")
    return attend(module, query, key, value, attention_mask, **kwargs)


def slot_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Mask = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Mask:
    """Build the additive mask that a model requests, for whole prompts or for one token per row.

    Args:
        batch_size: N
        q_length: L
        kv_length: S
        q_offset: 0 for prompts; in decoding [N] the position of each row's token.
        mask_function: the model's own function of broadcast (row, head, query, key) indices.
        attention_mask: ignored, because prompts are right-padded and a row's position gives its length.
        dtype: dtype of the mask.
        device: device of the mask.
        **kwargs: further arguments of ``sdpa_mask``.

    Returns:
        [N, 1, L, S], 0 where visible and minus infinity elsewhere; None means plain causal.
    """
    if mask_function is not None:
        kwargs["mask_function"] = mask_function
    if isinstance(q_offset, Tensor):
        if q_length != 1 or mask_function is None:
            raise NotImplementedError(f"a mask of {q_length} tokens a row, each row at its own position")
        rows = torch.arange(batch_size, device=device)[:, None, None, None]
        columns = torch.arange(kv_length, device=device)[None, None, None, :]
        visible = mask_function(rows, torch.zeros_like(rows), q_offset[:, None, None, None], columns)
        return _additive(visible.expand(batch_size, 1, 1, kv_length), dtype)
    mask = sdpa_mask(batch_size, q_length, kv_length, q_offset=q_offset, device=device, **kwargs)
    return None if mask is None else _additive(mask, dtype)


def _whole_mask(*args: Any, **kwargs: Any) -> Mask:
    """Call ``slot_mask`` so that it never returns None, because eager attention is not causal by itself."""
    return slot_mask(*args, **kwargs | {"allow_is_causal_skip": False})


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def _explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention by its definition, [N, L, H, D], a block of queries at a time."""
    num_rows, num_heads, num_queries, head_dim = query.shape
    num_kv_heads, num_keys = key.shape[1:3]
    group = num_heads // num_kv_heads
    scale = head_dim**-0.5 if scaling is None else scaling
    queries = query.reshape(num_rows, num_kv_heads, group, num_queries, head_dim)
    keys, values = key[:, :, None].transpose(-1, -2), value[:, :, None]
    out = query.new_empty(num_rows, num_queries, num_heads, value.shape[-1])
    step = max(1, _BLOCK_SCORES // (num_rows * num_heads * num_keys))
    for start in range(0, num_queries, step):
        stop = min(start + step, num_queries)
        # Compute in place: these are the largest tensors of a prompt's forward.
        scores = torch.matmul(queries[:, :, :, start:stop], keys).float().mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores.add_(mask[:, :, None, start:stop])
        elif num_queries > 1:
            later = (
                torch.arange(num_keys, device=query.device) > torch.arange(start, stop, device=query.device)[:, None]
            )
            scores = scores.masked_fill(later, -torch.inf)
        if sinks is not None:
            column = sinks.float().view(1, num_kv_heads, group, 1, 1).expand(num_rows, -1, -1, stop - start, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(-1)[..., :num_keys].to(value.dtype)
        attended = torch.matmul(weights, values).reshape(num_rows, num_heads, stop - start, value.shape[-1])
        out[:, start:stop] = attended.transpose(1, 2)
    return out


AttentionInterface.register(NAME, slot_attention)
AttentionInterface.register(EAGER_NAME, own_eager_attention)
AttentionMaskInterface.register(NAME, slot_mask)
AttentionMaskInterface.register(EAGER_NAME, _whole_mask)
