"""Top-k and top-p as ChatLearn defines them, applied to logits before SGLang samples.

SGLang cuts top-p off the whole distribution even where top-k was cut first, and returns logprobs of the uncut one. Here
the cut happens first, so that what is sampled, and the logprob that is returned, are of the distribution that
``LogprobBasis`` states: logits over temperature, cut to top-k, then to top-p of what is left.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class CutLogits(CustomLogitProcessor):  # type: ignore[misc]  # SGLang lives in another interpreter
    """Masks what a request's ``custom_params`` cut: ``temperature``, ``top_k`` (0: all), ``top_p``."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Cut.

        Args:
            logits: [N, V]
            custom_param_list: of the N requests.

        Returns:
            [N, V]; tokens that tie with the last one kept are kept.
        """
        assert custom_param_list is not None
        return cut(logits, custom_param_list)


def cut(logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
    """See ``CutLogits``."""
    rows, vocab = logits.shape
    assert rows == len(params), (rows, len(params))
    device = logits.device
    top_ks = torch.tensor([p["top_k"] or vocab for p in params], device=device).clamp(max=vocab)
    top_ps = torch.tensor([p["top_p"] for p in params], device=device, dtype=torch.float64)[:, None]
    temperatures = torch.tensor([p["temperature"] for p in params], device=device, dtype=torch.float64)[:, None]
    scaled, order = (logits.double() / temperatures).sort(dim=-1, descending=True)
    last_kept = scaled.gather(-1, top_ks[:, None] - 1)
    scaled = scaled.masked_fill(scaled < last_kept, -torch.inf)
    probabilities = torch.softmax(scaled, -1)
    outside = (probabilities.cumsum(-1) - probabilities) >= top_ps
    outside[:, 0] = False
    outside |= scaled == -torch.inf
    return logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
