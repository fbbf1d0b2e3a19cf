"""Outputs that a trainer computes per token or per sequence, and the request for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

Outputs = dict[str, Tensor]
"""Output name -> tensor aligned with the batch: one row per token, [T, ...], or one per sequence, [S, ...].

Every output has a record (``plugins.records.OutputSpec``, hook ``chatlearn_outputs``) with the shape and type of its
rows. Entry t of a per-token output describes token t given the tokens before it: for 7 tokens of which the first 4 are
the prompt, ``logprobs`` is ``[0, 0, 0, 0, a, b, c]``, and ``a`` is the logprob of token 4."""


@dataclass(slots=True, frozen=True)
class OutputRequest:
    """The outputs to compute, all from logits divided by ``temperature``."""

    names: frozenset[str]
    temperature: float = 1.0
    arguments: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    """Arguments of outputs that need more than the batch: ``{"k": 8}`` for ``topk_ids`` and ``topk_logprobs``;
    ``{"ids": "teacher_topk_ids"}`` for ``logprobs_at``, where the value names the token data that holds the ids."""
