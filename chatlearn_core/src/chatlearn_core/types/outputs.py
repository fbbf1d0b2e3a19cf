"""What a trainer can compute for each token or sequence, and how a loss or a flow asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

OutputName = Literal["logprobs", "entropy", "values", "scores", "topk", "hidden_states", "full_kl"]

Outputs = dict[str, Tensor]
"""Output name -> tensor, aligned with the batch.

Per token [T], where ``batch.loss_mask`` is True and 0 elsewhere (no head is applied to prompt tokens): ``logprobs``
(entry t: logprob of token t given those before it), ``entropy`` (entry t: entropy, nats, of the distribution token t
was drawn from) and ``values`` (entry t: value of the state in which token t was chosen, so that it lines up with the
advantage of token t). ``hidden_states`` [T, H] is whole. Per sequence [S]: ``scores`` (the head's output at the last
token)."""

SEQUENCE_OUTPUTS: frozenset[OutputName] = frozenset({"scores"})
"""Outputs with one row a sequence; all others have one a token."""


@dataclass(slots=True, frozen=True)
class OutputRequest:
    """The outputs that are needed, all computed from logits divided by ``temperature``."""

    names: frozenset[OutputName]
    temperature: float = 1.0
    top_k: int = 0
    """k of ``topk``."""
