"""Brings ``cut_logits`` into SGLang's sampler.

SGLang cuts top-p off the whole distribution even where top-k was cut first, and returns logprobs of the uncut one. Here
the cut happens before it samples, so that what is sampled, and the logprob that is returned, are of the distribution
that ``LogprobBasis`` states. Imported by SGLang's processes alone.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from .cut_logits import cut_logits


class CutLogits(CustomLogitProcessor):  # type: ignore[misc]  # SGLang lives in another interpreter
    """Applies what a request carries as ``custom_params``: see ``cut_logits``."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """[N, V] logits of N requests, cut."""
        assert custom_param_list is not None
        return cut_logits(logits, custom_param_list)
