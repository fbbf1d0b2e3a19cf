"""Causal attention for rows of equal length, with the score rules of architectures: windows, soft caps, sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CAPPED_ROWS = 256
"""Number of queries whose capped scores are held at once; the backward pass recomputes them."""
SINK_DIMENSIONS = 8
"""Number of dimensions added to a head for its sink: one would do, but kernels need multiples of eight."""


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """How one attention layer turns scores into probabilities."""

    scaling: float | None = None
    """Factor on the scores; None means 1 / sqrt(D)."""
    window: int | None = None
    """A token attends to itself and the ``window - 1`` tokens before it; None: to all before it."""
    softcap: float | None = None
    """Scores s become ``softcap * tanh(s / softcap)`` before the mask [2408.00118, 2.2]."""
    sinks: Tensor | None = None
    """[Hq] one score per head that takes part in the softmax but adds nothing to the output [2508.10925, 2.1.2]."""
    dropout: float = 0.0
    """Dropout rate on the probabilities."""


def attend(query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
    """Return the attention output [n, Hq, L, Dv] for query [n, Hq, L, D], key [n, Hkv, L, D] and value [n, Hkv, L, Dv].

    Hkv must divide Hq.
    """
    if rule.softcap is not None:
        return _capped(query, key, value, rule, rule.softcap)
    if rule.sinks is not None:
        return _with_sinks(query, key, value, rule, rule.sinks)
    width = query.shape[2]
    banded = rule.window is not None and width > rule.window
    mask = band(width, rule.window, query.device) if banded and rule.window is not None else None
    return nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=rule.dropout,
        is_causal=not banded,
        scale=rule.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def band(width: int, window: int, device: torch.device) -> Tensor:
    """Return the mask [L, L] bool: causal, each token sees at most ``window`` tokens including itself."""
    position = torch.arange(width, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule, sinks: Tensor) -> Tensor:
    """Add a token before each row as the sink: its value is 0, and the score of its key is the head's sink.

    Heads get extra dimensions in which only the queries (``sink / scaling``) and the sink's key (1) are nonzero, so
    that plain causal attention kernels compute the sink and its gradient.
    """
    count, num_heads, width, size = query.shape
    scaling = rule.scaling if rule.scaling is not None else size**-0.5
    score = (sinks / scaling).to(query.dtype).view(1, num_heads, 1, 1).expand(count, -1, width, 1)
    wide_query = torch.cat([query, score, query.new_zeros(count, num_heads, width, SINK_DIMENSIONS - 1)], dim=-1)
    wide_key = nn.functional.pad(key, (0, SINK_DIMENSIONS, 1, 0))
    sink_key = torch.zeros_like(wide_key[:, :, :1])
    sink_key[..., size] = 1.0
    wide_key = torch.cat([sink_key, wide_key[:, :, 1:]], dim=2)
    mask: Tensor | None = None
    if rule.window is not None and width > rule.window:
        mask = torch.ones(width + 1, width + 1, dtype=torch.bool, device=query.device)
        mask[1:, 1:] = band(width, rule.window, query.device)
    attended = nn.functional.scaled_dot_product_attention(
        nn.functional.pad(wide_query, (0, 0, 1, 0)),
        wide_key,
        nn.functional.pad(value, (0, 0, 1, 0)),
        attn_mask=mask,
        dropout_p=rule.dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=num_heads != key.shape[1],
    )
    return attended[:, :, 1:]


def _capped(query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule, softcap: float) -> Tensor:
    num_heads, width, size = query.shape[1:]
    if key.shape[1] != num_heads:
        key, value = (part.repeat_interleave(num_heads // part.shape[1], dim=1) for part in (key, value))
    scaling = rule.scaling if rule.scaling is not None else size**-0.5
    position = torch.arange(width, device=query.device)

    def of_rows(queries: Tensor, keys: Tensor, values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        scores = torch.tanh(queries @ keys.transpose(-1, -2) * (scaling / softcap)) * softcap
        distance = rows[:, None] - columns[None, :]
        hidden = (distance < 0) if rule.window is None else (distance < 0) | (distance >= rule.window)
        scores = scores.float().masked_fill(hidden, -torch.inf)
        if rule.sinks is not None:
            sink = rule.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], dim=-1)
        probabilities = scores.softmax(-1)[..., : len(columns)].to(values.dtype)
        return nn.functional.dropout(probabilities, rule.dropout, training=rule.dropout > 0) @ values

    outputs: list[Tensor] = []
    for start in range(0, width, CAPPED_ROWS):
        stop = min(start + CAPPED_ROWS, width)
        first = 0 if rule.window is None else max(0, start - rule.window + 1)
        parts = (query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop])
        places = (position[start:stop], position[first:stop])
        if torch.is_grad_enabled() and width > CAPPED_ROWS:
            outputs.append(checkpoint(of_rows, *parts, *places, use_reentrant=False))
        else:
            outputs.append(of_rows(*parts, *places))
    return torch.cat(outputs, dim=2)
