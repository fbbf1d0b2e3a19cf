"""AdamW over the trainable parameters of a model, and its state by parameter name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chatlearn_fsdp.options import FSDPOptions

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(model: nn.Module, options: FSDPOptions) -> torch.optim.AdamW:
    """Fused AdamW [1711.05101]; parameters of one dimension (norms, biases) do not decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_epsilon,
        fused=True,
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The live state by parameter name: ``exp_avg``, ``exp_avg_sq``, ``step``. Empty before the first step."""
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def allocate_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Give every trainable parameter the state it has before its first step, for loading into."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter not in optimizer.state:
            state = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS}
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": step, **state}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
