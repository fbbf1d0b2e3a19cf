"""Top-k and top-p as ChatLearn defines them: logits over temperature, cut to top-k, then to top-p of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def cut_logits(logits: Tensor, params: Sequence[Mapping[str, Any]]) -> Tensor:
    """Mask the tokens outside each row's top-k and top-p.

    Args:
        logits: [N, V]
        params: for each row ``temperature`` (above 0), ``top_k`` (0: the whole vocabulary) and ``top_p``. Example:
            ``{"temperature": 0.7, "top_k": 50, "top_p": 0.9}``.

    Returns:
        [N, V] the logits, -inf where masked. Tokens tied with the last top-k token are kept.
    """
    vocab = logits.shape[-1]
    device = logits.device
    top_ks = torch.tensor([p["top_k"] or vocab for p in params], device=device).clamp(max=vocab)[:, None]
    top_ps = torch.tensor([p["top_p"] for p in params], device=device, dtype=torch.float64)[:, None]
    temperatures = torch.tensor([p["temperature"] for p in params], device=device, dtype=torch.float64)[:, None]
    scaled, order = (logits.double() / temperatures).sort(dim=-1, descending=True)
    scaled = scaled.masked_fill(scaled < scaled.gather(-1, top_ks - 1), -torch.inf)
    probabilities = torch.softmax(scaled, -1)
    outside = (probabilities.cumsum(-1) - probabilities) >= top_ps
    # Rounding may bring the sum to 1 before the last token; only top-p below 1 cuts.
    outside &= top_ps < 1.0
    outside[:, 0] = False
    outside |= torch.isneginf(scaled)
    return logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
