"""Low-rank adapters [2106.09685] on a transformers model, through peft.

Adapters are injected into the model in place, so the model stays a transformers model. Its tensors have two sets of
names: the live ones (``q_proj.base_layer.weight``, ``q_proj.lora_A.default.weight``) and the original ones, under which
weights are exported with the adapters merged: W + (alpha / rank) B A.

Adapters are supported only for weights that a layer multiplies by: ``nn.Linear``, and GPT-2's ``Conv1D``, which stores
its weight transposed. Other targets are refused by name, because the exported model would differ from the trained one.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from chatlearn_core.exceptions import BackendError, ModelError

logger = logging.getLogger(__name__)

ADAPTER = "default"
BASE_LAYER = ".base_layer"


class LoraFields(Protocol):
    """A trainer's options of adapters; see ``LoraSettings``."""

    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def dropout(self) -> float: ...
    @property
    def target_modules(self) -> tuple[str, ...] | str: ...


@dataclass(slots=True, frozen=True)
class LoraSettings:
    """Settings of the adapters."""

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] | str = "all-linear"
    """Endings of module names; ``all-linear`` selects every plain linear layer except the heads."""

    @classmethod
    def of(cls, options: LoraFields) -> LoraSettings:
        """Return the settings that a trainer's options say."""
        return cls(options.rank, options.alpha, options.dropout, options.target_modules)


@dataclass(slots=True, frozen=True)
class Adapter:
    """The adapter of one weight."""

    down: Tensor
    """A, [rank, in]"""
    up: Tensor
    """B, [out, rank]"""
    scale: float
    """alpha / rank"""
    transposed: bool = False
    """Whether the weight is stored as [in, out]."""

    def merge(self, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """Return ``weight`` + scale ``up`` ``down`` as a new tensor.

        ``weight`` may be a slice of rows. Then pass the same rows of ``up`` or, for a transposed weight, the same
        columns of ``down``.
        """
        left, right = (down.T, up.T) if self.transposed else (up, down)
        return torch.addmm(weight, left.to(weight.dtype), right.to(weight.dtype), alpha=self.scale)


def add_adapters(model: PreTrainedModel, settings: LoraSettings, distribution: str = "chatlearn-fsdp") -> None:
    """Inject adapters and make only them, and a value or reward head, trainable. ``meta`` models work.

    Adapter values are not set here: call ``draw_adapters`` once they have memory.

    Args:
        model: the model.
        settings: of the adapters.
        distribution: the trainer's, whose extra ``lora`` an error names.

    Raises:
        BackendError: peft is not installed.
        ModelError: a target matches no module, or a module into which an adapter cannot be merged.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise BackendError(
            f"adapters need peft, which is not installed here; install it with `pip install '{distribution}[lora]'`,"
            " or remove options.lora"
        ) from error
    # In a mixture peft would treat "gate_proj" as the fused experts; under a plain holder it adapts the named modules.
    holder = nn.Module()
    holder.model = model
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # annotated as int, but only divided
        lora_dropout=settings.dropout,
        target_modules=[f"model.{name}" for name in _target_names(model, settings.target_modules)],
    )
    with warnings.catch_warnings():  # about transposed weights, which peft detects itself
        warnings.filterwarnings("ignore", "fan_in_fan_out", UserWarning)
        inject_adapter_in_model(config, holder, adapter_name=ADAPTER)
    for name, parameter in model.named_parameters():
        if name.startswith("score."):
            parameter.requires_grad_(True)
        # peft may keep adapters in float32, but a sharded unit needs one dtype.
        parameter.data = parameter.data.to(model.dtype)


def draw_adapters(model: PreTrainedModel, seed: int, copy: Callable[[Tensor, Tensor], None]) -> None:
    """Draw A from U(-1/sqrt(in), 1/sqrt(in)) and set B to 0, keyed only by ``seed`` and the order of the layers.

    Args:
        model: model with adapters.
        seed: seed of A.
        copy: ``copy(values, target)`` writes a whole tensor into a live, perhaps sharded one.
    """
    for (_, values), adapter in zip(drawn_downs(model, seed), adapters(model).values(), strict=True):
        copy(values, adapter.down)
        copy(torch.zeros(adapter.up.shape), adapter.up)


def drawn_downs(model: PreTrainedModel, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the original name of each adapted weight, and the initial A, in the order of the layers; ``meta`` models
    work.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, adapter in adapters(model).items():
        bound = adapter.down.shape[1] ** -0.5
        yield name, torch.empty(adapter.down.shape).uniform_(-bound, bound, generator=generator)


def adapters(model: PreTrainedModel) -> dict[str, Adapter]:
    """Return the adapters by the original state name of their weight; empty without adapters."""
    found: dict[str, Adapter] = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            layer: Any = module
            down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            transposed = isinstance(layer.get_base_layer(), Conv1D)
            found[f"{name}.weight"] = Adapter(down.detach(), up.detach(), float(layer.scaling[ADAPTER]), transposed)
    return found


def adapter_names(model: PreTrainedModel) -> dict[str, tuple[str, str]]:
    """Return original weight name -> names under which peft saves its A and B."""
    return {weight: peft_names(weight) for weight in adapters(model)}


def peft_names(weight: str) -> tuple[str, str]:
    """Return the names under which peft saves A and B of the weight of a module."""
    module = f"base_model.model.{weight.removesuffix('.weight')}"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def adapter_config(model: PreTrainedModel, settings: LoraSettings) -> dict[str, Any]:
    """Return the content of peft's ``adapter_config.json`` for these adapters.

    Modules are named by their endings, or in full if other modules share the ending.
    """
    found = adapters(model)
    adapted = {weight.removesuffix(".weight") for weight in found}
    ends = {name.rsplit(".", 1)[-1] for name in adapted}
    shared = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules() if name not in adapted} & ends
    targets = sorted({end if (end := name.rsplit(".", 1)[-1]) not in shared else name for name in adapted})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.config.name_or_path or None,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": bool(found) and all(adapter.transposed for adapter in found.values()),
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the live state without adapters, under the original names."""
    return {
        name.replace(BASE_LAYER, ""): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_A." not in name and ".lora_B." not in name
    }


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the live state that training with adapters changes: adapters, and a value or reward head."""
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if ".lora_A." in name or ".lora_B." in name or name.startswith("score.")
    }


def _target_names(model: PreTrainedModel, target: tuple[str, ...] | str) -> list[str]:
    """Return the names of the modules to adapt.

    Raises:
        ModelError: an ending matches no module, or a module into which an adapter cannot be merged.
    """
    modules = dict(model.named_modules())
    names_of = _names_by_parameter(model)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers does not annotate it
    if isinstance(target, str):
        linear = {
            name: _problem(modules, name, names_of)
            for name, module in modules.items()
            if isinstance(module, nn.Linear | Conv1D) and module is not head and name != "score"
        }
        left_out = {name.rsplit(".", 1)[-1] for name, problem in linear.items() if problem}
        left_out |= {name.rsplit(".", 1)[-1] for name, weight in model.named_parameters() if weight.dim() == 3}
        if left_out:
            logger.warning(
                "%s gets no adapters for %s: these are not plain linear layers, so merging would not be exact",
                type(model).__name__,
                ", ".join(sorted(left_out)),
            )
        names = [name for name, problem in linear.items() if problem is None]
        if not names:
            raise ModelError(f"no adapters for {type(model).__name__}: target_modules {target} matches no linear layer")
        return names
    found: list[str] = []
    for end in target:
        matching = [name for name in modules if name == end or name.endswith(f".{end}")]
        if not matching:
            linear_ends = {name.rsplit(".", 1)[-1] for name, module in modules.items() if isinstance(module, nn.Linear)}
            raise ModelError(
                f"target_modules {end!r} matches no module of {type(model).__name__}; its linear layers are"
                f" {', '.join(sorted(linear_ends))}. (Experts that a model stores in one tensor are not modules and"
                " cannot have adapters.)"
            )
        for name in matching:
            problem = _problem(modules, name, names_of)
            if problem is not None:
                raise ModelError(
                    f"target_modules {end!r} matches {name} of {type(model).__name__}, which {problem}. Leave it out of"
                    " target_modules"
                )
        found += matching
    return sorted(set(found))


def _problem(modules: Mapping[str, nn.Module], name: str, names_of: Mapping[int, list[str]]) -> str | None:
    """Return why merging an adapter into this module's weight would change the model; None if merging is exact."""
    module = modules[name]
    if not isinstance(module, nn.Linear | Conv1D):
        return f"is a {type(module).__name__}; adapters are for linear layers only"
    if type(module).forward not in (nn.Linear.forward, Conv1D.forward) or hasattr(module, "parametrizations"):
        return f"is a {type(module).__name__}, not a plain linear layer, so merging would change the adapter"
    names = names_of[id(module.weight)]
    if len(names) > 1:
        return f"shares its weight ({' and '.join(names)}), so merging an adapter would also change the other uses"
    parent, _, attribute = name.rpartition(".")
    if _reads_weight(modules[parent], attribute):
        return f"is not called: {type(modules[parent]).__name__} reads its weight directly and would bypass an adapter"
    return None


def _reads_weight(parent: nn.Module, attribute: str) -> bool:
    """Whether a module's source code reads the weight of its child instead of calling the child."""
    try:
        source = _source(type(parent).__module__, type(parent).__qualname__)
    except (OSError, TypeError, AttributeError):
        return False
    facts = "dtype|device|shape|size|dim|ndim|requires_grad"
    return re.search(rf"self\.{attribute}\.weight\b(?!\.({facts})\b)", source) is not None


@functools.cache
def _source(module: str, name: str) -> str:
    return inspect.getsource(getattr(sys.modules[module], name))


def _names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """Return parameter identity -> its names; tied parameters have several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return names
