"""Checks which LoRA adapters an engine can serve, and translates them for SGLang.

SGLang reads only the rank and alpha of peft's configuration, skips tensors that it cannot place, and fuses projections
as if an adapter had all of them. This module therefore refuses, by name and before any transfer, what SGLang would
compute wrongly, and fills the missing parts of a fused layer with zeros.
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
"""Groups of projections that SGLang computes as one."""
ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"})
MLP = frozenset({"gate_proj", "up_proj", "gate_up_proj", "down_proj"})
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_UNSUPPORTED = ("use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters")
"""Fields of peft's configuration that SGLang ignores; they must not be set."""
_MAX_LINES = 10


@dataclass(slots=True, frozen=True)
class AdapterTerms:
    """The adapters that an engine was started to serve."""

    target_modules: tuple[str, ...]
    """Name endings of the layers that an adapter may change, such as ``q_proj``."""
    max_rank: int


def target_modules(model: WeightManifest) -> tuple[str, ...]:
    """Return the name endings of the linear layers that adapters may change.

    These are the layers of attention, and those of the MLP in models without experts, because SGLang would wrap the
    experts together with the MLP.
    """
    served = ATTENTION if any(_EXPERT.search(name) for name in model.tensors) else ATTENTION | MLP
    return tuple(sorted({ending for name in model.tensors if (ending := _ending(name)) in served}))


@dataclass(slots=True, frozen=True)
class ServedAdapter:
    """An adapter that SGLang can serve, described for SGLang in plain builtins."""

    rank: int
    alpha: float
    target_modules: list[str]
    absent: list[tuple[str, str, list[int]]]
    """(name, dtype, shape) of tensors to fill with zeros."""

    @property
    def configuration(self) -> dict[str, Any]:
        """The fields of ``adapter_config.json`` that SGLang reads."""
        return configuration(self.rank, self.alpha, self.target_modules)


def served_adapter(offered: WeightManifest, model: WeightManifest, terms: AdapterTerms) -> ServedAdapter:
    """Check an offered adapter and translate it for SGLang.

    Args:
        offered: peft's tensors and configuration.
        model: manifest of the base model.
        terms: what the engine was started to serve.

    Raises:
        ValueError: has one line for each thing that SGLang would compute wrongly.
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
            lines.append(f"{name}: matches no linear layer of the model")
        elif _ending(weight.name) not in targets or _EXPERT.search(weight.name):
            lines.append(f"{name}: SGLang here serves adapters only for {', '.join(targets)}, outside experts")
        elif spec.shape != (expected := _shape(weight, match["half"], rank)):
            lines.append(f"{name}: shape {list(spec.shape)} offered, {list(expected)} expected")
        else:
            halves.setdefault(match["module"], set()).add(match["half"])
    lines += [f"{module}: only lora_{found.pop()} is offered" for module, found in halves.items() if len(found) == 1]
    if not halves and not lines:
        lines.append("the adapter has no tensors")
    if lines:
        more = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
        raise ValueError("\n".join(f"  {line}" for line in lines[:_MAX_LINES] + more))
    dtype = next(iter(offered.tensors.values())).dtype
    absent = [
        (f"base_model.model.{module}.lora_{half}.weight", dtype, list(_shape(weight, half, rank)))
        for module in _missing_fused_modules(halves)
        if (weight := model.tensors.get(f"{module}.weight")) is not None
        for half in "AB"
    ]
    return ServedAdapter(rank, alpha, list(targets), absent)


def _missing_fused_modules(modules: Mapping[str, object]) -> list[str]:
    """Return the modules that SGLang fuses with some of these but that are not among them."""
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
    """The last part of a module name: ``q_proj`` for ``model.layers.0.self_attn.q_proj.weight``."""
    return weight.removesuffix(".weight").rpartition(".")[2]
