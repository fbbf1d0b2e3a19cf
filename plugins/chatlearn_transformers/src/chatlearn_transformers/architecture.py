"""Which models can be generated from with one cache row a sequence, checked before a run starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chatlearn_core.exceptions import ModelError

_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary frequencies that depend on the longest sequence of a batch: a token would depend on its neighbours."""
_PROBE_TOKENS = 7
_TOLERANCE = 1e-3
_LOW_PRECISION_TOLERANCE = 0.25
"""Root mean square difference allowed, as a share of the logits' spread. Low precision rounds, and may route a token
to other experts; a wrong computation lies far outside."""


def check_architecture(model: Any, path: str) -> None:
    """Refuse what a cache of full attention with per-row positions cannot serve.

    Raises:
        ModelError: names the model type and what it has that is not supported.
    """
    config = model.config.get_text_config()
    reasons: list[str] = []
    if getattr(model.config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder")
    layer_types = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if layer_types:
        reasons.append(f"it has layers of type {', '.join(layer_types)} (config.json: layer_types)")
    elif getattr(config, "layer_types", None) is None and _slides(config):
        reasons.append(f"it has sliding-window attention (config.json: sliding_window {config.sliding_window})")
    if getattr(model, "_is_stateful", False):
        reasons.append("it keeps a recurrent state")
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type") if isinstance(rope, dict) else None
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        reasons.append(f"its rotary embedding {rope_type!r} depends on the longest sequence of a batch")
    if model.get_output_embeddings() is None or model.base_model is model:
        reasons.append("its head cannot be applied apart from its body")
    if reasons:
        raise ModelError(
            f"the generator 'transformers' cannot serve {path} (model type {config.model_type!r}): {'; '.join(reasons)}"
            ". It serves decoders with full attention in every layer; for this model use another generator backend "
            "(vllm, sglang)."
        )


def probe_token_ids(vocab_size: int, device: torch.device) -> Tensor:
    """[1, T] arbitrary fixed tokens to compare two ways of computing with."""
    return ((torch.arange(_PROBE_TOKENS, device=device) * 7919 + 11) % vocab_size)[None]


def check_probe(expected: Tensor, found: Tensor, path: str, model_type: str) -> None:
    """Compare logits of the model's own forward with those computed through the cache.

    Catches what no list of architectures can: scaled or capped logits, positions that are not rotary, attention that
    ignores its mask.

    Args:
        expected: [T, V]
        found: [T, V]
        path: for the message.
        model_type: for the message.

    Raises:
        ModelError: they differ by more than rounding.
    """
    if not bool(torch.isfinite(expected).all()):
        raise ModelError(f"{path}: the model's logits are not finite on a short probe; its weights are damaged")
    allowed = _TOLERANCE if expected.dtype in (torch.float32, torch.float64) else _LOW_PRECISION_TOLERANCE
    spread = float(expected.float().std()) or 1.0
    difference = float((expected.float() - found.float()).square().mean().sqrt()) / spread
    if not difference <= allowed:
        raise ModelError(
            f"the generator 'transformers' cannot serve {path} (model type {model_type!r}): computed through its"
            f" cache, logits differ from the model's own by {difference:.3g} of their spread, {allowed} is allowed. Use"
            " another generator backend (vllm, sglang)."
        )


def _slides(config: Any) -> bool:
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
