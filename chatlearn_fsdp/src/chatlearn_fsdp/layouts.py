"""Which models the ranks of a layout can share. Imports nothing heavy: a plan is checked with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatlearn_fsdp.options import FSDPOptions
from chatlearn_trainer_kit import ulysses_sizes

TENSOR_PARALLEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers ``tensor_parallel.split_layers`` splits."""
DIVIDED = {
    "num_attention_heads": "query heads",
    "num_key_value_heads": "key-value heads",
    "intermediate_size": "MLP columns",
}
"""Fields of a configuration that tensor parallel ranks divide, and what they count."""


def check_model(options: FSDPOptions, config: Mapping[str, Any], ranks: int) -> list[str]:
    """See ``TrainerSpec.check_model``."""
    return [*ulysses_sizes.check_model(options, config, ranks), *tensor_problems(options, config, ranks)]


def tensor_problems(options: FSDPOptions, config: Mapping[str, Any], ranks: int) -> list[str]:
    """Return why tensor parallel ranks cannot split a model with this configuration."""
    size = options.tensor_parallel
    if size == 1:
        return []
    model_type = config.get("model_type")
    if model_type not in TENSOR_PARALLEL_TYPES:
        return [
            f"tensor_parallel {size} splits the layers of {', '.join(TENSOR_PARALLEL_TYPES)}, but the model's type is"
            f" {model_type!r}; set tensor_parallel: 1, or take the trainer 'megatron' if it knows the model"
        ]
    counts = {what: config[field] for field, what in DIVIDED.items() if isinstance(config.get(field), int)}
    fitting = ulysses_sizes.nearest_sizes(size, ranks, *counts.values())
    return [
        f"tensor_parallel {size} does not divide the model's {number} {what}; of {ranks} ranks it may be {fitting}"
        for what, number in counts.items()
        if number % size
    ]
