"""Sequence lengths at which a model's computation changes, from its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from chatlearn_hf.sequence_rope import LENGTH_DEPENDENT

WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "local_attention")
CHUNKS = ("attention_chunk_size",)
SELECTIONS = ("index_topk", "keep_window_size", "indexer_budget", "index_topk_blocks")
"""Fields with the number of tokens, or blocks of them, that a sparse attention keeps of a row."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """One such length. Example: ``Threshold("sliding_window", 4096, "window")``."""

    name: str
    tokens: int
    kind: Literal["window", "chunk", "selection", "rope"]

    @property
    def counts_row(self) -> bool:
        """Whether the threshold counts tokens of a whole row, so that several short sequences can reach it together."""
        return self.kind == "chunk"


def thresholds(config: Any) -> list[Threshold]:
    """Return the thresholds in a text model's configuration."""
    kinds: dict[Literal["window", "chunk", "selection"], tuple[str, ...]] = {
        "window": WINDOWS,
        "chunk": CHUNKS,
        "selection": SELECTIONS,
    }
    found = [
        Threshold(name, value, kind)
        for kind, names in kinds.items()
        for name in names
        if isinstance(value := getattr(config, name, None), int) and value > 0 and _is_used(config, name)
    ]
    rope = getattr(config, "rope_parameters", None)
    for entry in _ropes(rope) if isinstance(rope, dict) else ():
        if any(kind in str(entry.get("rope_type")) for kind in LENGTH_DEPENDENT):
            # ``dynamic`` starts scaling at the end of the configured positions.
            name = ("original_" if "longrope" in entry["rope_type"] else "") + "max_position_embeddings"
            value = entry.get(name) or getattr(config, name, None)
            if isinstance(value, int):
                found.append(Threshold(name, value, "rope"))
    return found


def _is_used(config: Any, name: str) -> bool:
    layers = getattr(config, "layer_types", None)
    return name != "sliding_window" or not layers or set(layers) != {"full_attention"}


def _ropes(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rotary settings, of which there may be one for each type of layer."""
    if "rope_type" in parameters:
        yield parameters
    for value in parameters.values():
        if isinstance(value, dict):
            yield from _ropes(value)
