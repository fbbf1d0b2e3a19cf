"""Builds optimizers by name for a model's trainable parameters, and accesses their state by parameter name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from chatlearn_trainer_kit.options import OptimizerOptions

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(model: nn.Module, options: OptimizerOptions) -> torch.optim.Optimizer:
    """Build the optimizer named by ``options.optimizer``; one-dimensional parameters (norms, biases) have no weight
    decay.

    ``adamw`` is torch's fused AdamW [1711.05101]; ``sgd`` is torch's SGD, with classical momentum.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate, momentum=options.momentum)
    return torch.optim.AdamW(
        groups,
        lr=options.learning_rate,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_epsilon,
        fused=True,
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the live state by parameter name; empty before the first step.

    ``adamw`` has ``exp_avg``, ``exp_avg_sq``, ``step``; ``sgd`` with momentum has ``momentum_buffer``.
    """
    return {
        name: {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def allocate_state(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Give every trainable parameter its initial state, for loading into.

    Args:
        optimizer: from ``build_optimizer``.
        parameters: the tensors that it updates; others, without gradients, are left out.
    """
    for parameter in parameters:
        if not parameter.requires_grad or parameter in optimizer.state:
            continue
        if isinstance(optimizer, torch.optim.AdamW):
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": step, **{name: _zeros(parameter) for name in MOMENTS}}
        elif optimizer.defaults["momentum"]:
            optimizer.state[parameter] = {"momentum_buffer": _zeros(parameter)}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)
