"""Which Ulysses groups divide a model. Imports nothing heavy: a plan is checked with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from chatlearn_trainer_kit.options import PackedTrainerOptions


def check_model(options: PackedTrainerOptions, config: Mapping[str, Any], ranks: int) -> list[str]:
    """See ``TrainerSpec.check_model``: Ulysses ranks exchange tokens for query heads, of which each has as many."""
    heads = config.get("num_attention_heads", config.get("n_head"))
    if not isinstance(heads, int) or heads % options.ulysses == 0:
        return []
    return [
        f"ulysses {options.ulysses} does not divide the model's {heads} query heads; of {ranks} ranks it may be"
        f" {nearest_sizes(options.ulysses, ranks, heads)}"
    ]


def nearest_sizes(wanted: int, *numbers: int) -> str:
    """Return the three sizes nearest to ``wanted`` that divide all numbers, in words."""
    common = math.gcd(*numbers)
    fitting = [size for size in range(1, common + 1) if common % size == 0]
    near = sorted(fitting, key=lambda size: (abs(size - wanted), size))[:3]
    return ", ".join(map(str, sorted(near)))
