"""Runs ``cut_logits`` in SGLang's sampler.

SGLang applies top-p to the whole distribution even after top-k, and returns logprobs of the uncut distribution. Here
the cut happens before sampling, so that samples and their logprobs follow the distribution that ``LogprobBasis``
states. Only SGLang's processes import this module.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from .cut_logits import cut_logits


class CutLogits(CustomLogitProcessor):  # type: ignore[misc]  # SGLang lives in another interpreter
    """Apply each request's ``custom_params`` to its logits; see ``cut_logits``."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Return the masked logits, [N, V] for N requests."""
        assert custom_param_list is not None
        return cut_logits(logits, custom_param_list)
