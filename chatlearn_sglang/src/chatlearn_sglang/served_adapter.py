"""Which LoRA adapters an engine serves, and what SGLang gets of one.

SGLang reads the rank and alpha of peft's configuration and nothing else, skips tensors that it has no place for, and
fuses projections by assuming that an adapter has all of them. So what it would get wrong is refused by name before a
byte moves, and what an adapter leaves out of a fused layer is filled with zeros.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chatlearn_core.types import TensorSpec, WeightManifest
from chatlearn_sglang.engine_side.adapter import configuration

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that SGLang computes as one."""
ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"})
MLP = frozenset({"gate_proj", "up_proj", "gate_up_proj", "down_proj"})
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_UNSUPPORTED = ("use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters")
"""Of peft's configuration: what SGLang leaves out of account, if it is set."""
_MAX_LINES = 10


@dataclass(slots=True, frozen=True)
class AdapterTerms:
    """What an engine was started to serve."""

    target_modules: tuple[str, ...]
    """Endings of the layers that an adapter may change."""
    max_rank: int


def target_modules(model: WeightManifest) -> tuple[str, ...]:
    """Endings of the linear layers that adapters may change: of attention, and of the MLP where there are no experts,
    which SGLang would wrap together with it.
    """
    served = ATTENTION if any(_EXPERT.search(name) for name in model.tensors) else ATTENTION | MLP
    return tuple(sorted({ending for name in model.tensors if (ending := _ending(name)) in served}))


@dataclass(slots=True, frozen=True)
class ServedAdapter:
    """An adapter that SGLang can serve, in SGLang's words: plain builtins."""

    rank: int
    alpha: float
    target_modules: list[str]
    absent: list[tuple[str, str, list[int]]]
    """(name, dtype, shape) of tensors that stay zero."""

    @property
    def configuration(self) -> dict[str, Any]:
        """What SGLang reads of ``adapter_config.json``."""
        return configuration(self.rank, self.alpha, self.target_modules)


def served_adapter(offered: WeightManifest, model: WeightManifest, terms: AdapterTerms) -> ServedAdapter:
    """Translate what a sync offers.

    Args:
        offered: peft's tensors and configuration.
        model: the base model's.
        terms: of the engine.

    Raises:
        ValueError: one line for each thing that SGLang would get wrong.
    """
    config = offered.adapter
    assert config is not None
    rank = int(config["r"])
    alpha = float(config["lora_alpha"])
    if config.get("use_rslora"):  # alpha / sqrt(rank), where SGLang divides by rank [2312.03732]
        alpha *= math.sqrt(rank)
    targets = terms.target_modules
    lines = [f"adapter_config.{key}: {config[key]!r}, which SGLang ignores" for key in _UNSUPPORTED if config.get(key)]
    if config.get("bias", "none") != "none":
        lines.append(f"adapter_config.bias: {config['bias']!r}, which SGLang ignores")
    if rank > terms.max_rank:
        lines.append(f"adapter_config.r: rank {rank}, above options.lora.max_rank {terms.max_rank}")
    halves: dict[str, set[str]] = {}
    for name, spec in sorted(offered.tensors.items()):
        match = _TENSOR.fullmatch(name)
        weight = None if match is None else model.tensors.get(f"{match['module']}.weight")
        if match is None or weight is None or len(weight.shape) != 2:
            lines.append(f"{name}: belongs to no linear layer of the model")
        elif _ending(weight.name) not in targets or _EXPERT.search(weight.name):
            lines.append(f"{name}: SGLang serves adapters of {', '.join(targets)} here, outside experts")
        elif spec.shape != (expected := _shape(weight, match["half"], rank)):
            lines.append(f"{name}: shape {list(spec.shape)} offered, {list(expected)} expected")
        else:
            halves.setdefault(match["module"], set()).add(match["half"])
    lines += [f"{module}: only lora_{found.pop()} is offered" for module, found in halves.items() if len(found) == 1]
    if not halves and not lines:
        lines.append("it has no tensors")
    if lines:
        more = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
        raise ValueError("\n".join(f"  {line}" for line in lines[:_MAX_LINES] + more))
    dtype = next(iter(offered.tensors.values())).dtype
    absent = [
        (f"base_model.model.{module}.lora_{half}.weight", dtype, list(_shape(weight, half, rank)))
        for module in _left_out(halves)
        if (weight := model.tensors.get(f"{module}.weight")) is not None
        for half in "AB"
    ]
    return ServedAdapter(rank, alpha, list(targets), absent)


def _left_out(modules: Mapping[str, object]) -> list[str]:
    """Modules that are fused with some of these and are not among them."""
    found = set()
    for module in modules:
        parent, _, ending = module.rpartition(".")
        for group in FUSED:
            if ending in group:
                found |= {f"{parent}.{other}" for other in group}
    return sorted(found - modules.keys())


def _shape(weight: TensorSpec, half: str, rank: int) -> tuple[int, int]:
    return (rank, weight.shape[1]) if half == "A" else (weight.shape[0], rank)


def _ending(weight: str) -> str:
    """``q_proj`` of ``model.layers.0.self_attn.q_proj.weight``."""
    return weight.removesuffix(".weight").rpartition(".")[2]
