"""Which models can be generated from with one cache row a sequence, as far as their configuration says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chatlearn_core.exceptions import ModelError

_LENGTH_DEPENDENT_ROPE = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
"""Rotary frequencies that depend on the longest sequence of a batch, so a token would depend on its neighbours and on
tokens that come after it; and the configuration field up to which they are constant."""
_SPAN_WORDS = ("window", "chunk", "local", "index_topk")
"""Parts of the names of configuration fields that may hold how far attention reaches, tokens..."""
_NOT_SPANS = ("num_", "layers", "pattern")
"""...and of those that do not (``num_local_experts``)."""


def check_architecture(model: Any, path: str, max_length: int) -> None:
    """Refuse what no cache of rows at positions of their own can serve.

    Args:
        model: the loaded model.
        path: for the message.
        max_length: longest sequence that will be asked for, tokens.

    Raises:
        ModelError: names the model type and what it has that is not supported.
    """
    config = model.config.get_text_config()
    reasons: list[str] = []
    if model.get_output_embeddings() is None:
        reasons.append("it has no head that gives logits")
    for rope_type, original in sorted(_length_dependent_rope(config), key=str):
        if original is None or max_length > original:
            remedy = "" if original is None else f"; it does not up to {original} tokens: set model.max_length to that"
            reasons.append(f"its rotary embedding {rope_type!r} depends on the longest sequence of a batch{remedy}")
    if reasons:
        raise ModelError(
            f"the generator 'transformers' cannot serve {path} (model type {config.model_type!r}): {'; '.join(reasons)}"
            ". Or use another generator backend (vllm, sglang)."
        )


def attention_spans(config: Any, max_length: int) -> list[int]:
    """Every number of tokens at which an attention may stop to reach further back, in ascending order.

    Args:
        config: of the model.
        max_length: longest sequence; what reaches as far never stops.
    """
    found: set[int] = set()
    for name, value in config.get_text_config().to_dict().items():
        if any(word in name for word in _SPAN_WORDS) and not any(word in name for word in _NOT_SPANS):
            values = value if isinstance(value, list | tuple) else [value]
            found |= {entry for entry in values if type(entry) is int}
    return sorted(span for span in found if 1 <= span < max_length)


def _length_dependent_rope(config: Any) -> Iterator[tuple[str, int | None]]:
    """(type, length up to which it is constant) of each; transformers nests them by layer type in some models."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, Mapping):
        return
    nested = [entry for entry in rope.values() if isinstance(entry, Mapping)]
    for entry in {str(entry): entry for entry in (nested or [rope])}.values():
        rope_type = entry.get("rope_type")
        if rope_type not in _LENGTH_DEPENDENT_ROPE:
            continue
        field = _LENGTH_DEPENDENT_ROPE[rope_type]
        constant_up_to = entry.get(field, getattr(config, field, None))
        yield rope_type, None if constant_up_to is None else int(constant_up_to)
