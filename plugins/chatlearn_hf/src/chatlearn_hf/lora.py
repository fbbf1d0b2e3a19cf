"""Low-rank adapters [2106.09685] on a transformers model, through peft.

Adapters are injected into the model in place, so the model stays a transformers model. Its tensors keep two sets of
names: the live ones (``q_proj.base_layer.weight``, ``q_proj.lora_A.default.weight``) and those it had before, under
which weights leave it with the adapters merged: W + (alpha / rank) B A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from chatlearn_core.exceptions import BackendError, ModelError

ADAPTER = "default"
BASE_LAYER = ".base_layer"


@dataclass(slots=True, frozen=True)
class LoraSettings:
    """Which adapters."""

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] | str = "all-linear"
    """Endings of module names; ``all-linear``: every linear layer but the heads."""


@dataclass(slots=True, frozen=True)
class Adapter:
    """The adapter of one weight."""

    down: Tensor
    """A, [rank, in]"""
    up: Tensor
    """B, [out, rank]"""
    scale: float
    """alpha / rank"""

    def merge(self, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """``weight`` + scale ``up`` ``down``, a new tensor; rows of ``weight`` and ``up`` correspond."""
        return torch.addmm(weight, up.to(weight.dtype), down.to(weight.dtype), alpha=self.scale)


def add_adapters(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Inject adapters and leave only them trainable, and a value or reward head. ``meta`` models work.

    The adapters' values are not set here: call ``draw_adapters`` once they have memory.

    Raises:
        BackendError: peft is not installed.
        ModelError: no module of the model matches, or a matching one is not a linear layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear
    except ImportError as error:
        raise BackendError(
            "adapters need peft, which is not installed here; install it with `pip install 'chatlearn-fsdp[lora]'`,"
            " or remove options.lora"
        ) from error
    target = settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft says int; it only divides it
        lora_dropout=settings.dropout,
        target_modules=target if isinstance(target, str) else list(target),
        exclude_modules=["score"] if hasattr(model, "score") else None,
    )
    try:
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ModelError(f"no adapters for {type(model).__name__} with target_modules {target}: {error}") from error
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and type(module) is not Linear:
            raise ModelError(
                f"target_modules {target} matches {name} of {type(model).__name__}, which is a"
                f" {type(module.get_base_layer()).__name__}; adapters are for linear layers only"
            )
    for name, parameter in model.named_parameters():
        if name.startswith("score."):
            parameter.requires_grad_(True)
        # peft may keep adapters in float32; a unit that is sharded has one dtype.
        parameter.data = parameter.data.to(model.dtype)


def draw_adapters(model: PreTrainedModel, seed: int, copy: Callable[[Tensor, Tensor], None]) -> None:
    """Set A to U(-1/sqrt(in), 1/sqrt(in)) and B to 0, keyed by ``seed`` and the order of the layers alone.

    Args:
        model: with adapters.
        seed: of A.
        copy: writes a whole tensor (first) into a live, perhaps sharded one.
    """
    generator = torch.Generator().manual_seed(seed)
    for adapter in adapters(model).values():
        bound = adapter.down.shape[1] ** -0.5
        copy(torch.empty(adapter.down.shape).uniform_(-bound, bound, generator=generator), adapter.down)
        copy(torch.zeros(adapter.up.shape), adapter.up)


def adapters(model: PreTrainedModel) -> dict[str, Adapter]:
    """The adapters by the state name that their weight had before they were injected; none without adapters."""
    found: dict[str, Adapter] = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            layer: Any = module
            down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            found[f"{name}.weight"] = Adapter(down.detach(), up.detach(), float(layer.scaling[ADAPTER]))
    return found


def adapter_names(model: PreTrainedModel) -> dict[str, tuple[str, str]]:
    """By the state name of each adapted weight, the names under which peft saves its A and its B."""
    names: dict[str, tuple[str, str]] = {}
    for weight in adapters(model):
        module = f"base_model.model.{weight.removesuffix('.weight')}"
        names[weight] = (f"{module}.lora_A.weight", f"{module}.lora_B.weight")
    return names


def adapter_config(model: PreTrainedModel, settings: LoraSettings) -> dict[str, Any]:
    """What peft's ``adapter_config.json`` says of these adapters, the modules named by their endings."""
    endings = sorted({weight.removesuffix(".weight").rsplit(".", 1)[-1] for weight in adapters(model)})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.config.name_or_path or None,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": endings,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """The state without adapters, under the names it had before they were injected; live tensors."""
    return {
        name.replace(BASE_LAYER, ""): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_A." not in name and ".lora_B." not in name
    }


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """What training with adapters changes, by live names: adapters, and a value or reward head."""
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if ".lora_A." in name or ".lora_B." in name or name.startswith("score.")
    }
