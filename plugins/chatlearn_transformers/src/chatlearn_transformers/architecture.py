"""Checks from a model's configuration whether it works with one cache row per sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chatlearn_core.exceptions import ModelError

_LENGTH_DEPENDENT_ROPE = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
"""Types of rotary embedding whose frequencies depend on the longest sequence of a batch, so that a token would depend
on its neighbours and on later tokens. The value is the configuration field up to whose length they are constant."""
_SPAN_NAMES = ("window", "chunk", "local", "index_topk")
"""A configuration field may hold the reach of attention in tokens if its name contains one of these words..."""
_NON_SPAN_NAMES = ("num_", "layers", "pattern")
"""...and none of these (``num_local_experts``)."""


def check_architecture(model: Any, path: str, max_length: int) -> None:
    """Refuse models that a cache with separate positions per row cannot serve.

    Args:
        model: the loaded model.
        path: for the message.
        max_length: longest sequence that may be requested, tokens.

    Raises:
        ModelError: names the model type and its unsupported properties.
    """
    config = model.config.get_text_config()
    reasons: list[str] = []
    if model.get_output_embeddings() is None:
        reasons.append("it has no language-model head")
    for rope_type, original in sorted(_length_dependent_rope(config), key=str):
        if original is None or max_length > original:
            remedy = "" if original is None else f"; set model.max_length to {original} or less, where it is constant"
            reasons.append(f"its rotary embedding {rope_type!r} depends on the longest sequence of a batch{remedy}")
    if reasons:
        raise ModelError(
            f"the generator 'transformers' cannot serve {path} (model type {config.model_type!r}): {'; '.join(reasons)}"
            ". Or use another generator backend (vllm, sglang)."
        )


def attention_spans(config: Any, max_length: int) -> list[int]:
    """Return every number of tokens that may limit the reach of an attention, in ascending order.

    Args:
        config: the model's configuration.
        max_length: longest sequence; larger limits have no effect and are left out.
    """
    found: set[int] = set()
    for name, value in config.get_text_config().to_dict().items():
        if any(word in name for word in _SPAN_NAMES) and not any(word in name for word in _NON_SPAN_NAMES):
            values = value if isinstance(value, list | tuple) else [value]
            found |= {entry for entry in values if type(entry) is int}
    return sorted(span for span in found if 1 <= span < max_length)


def _length_dependent_rope(config: Any) -> Iterator[tuple[str, int | None]]:
    """Yield (type, length up to which it is constant) of each such embedding; some models nest them by layer type."""
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
