"""Tensor parallelism [1909.08053] of dense decoder layers, in torch's DTensor.

The ranks of a group work on the same sequences. Of each layer a rank holds the columns of its heads (queries, keys,
values) and of its part of the MLP, and the rows of the output projections that belong to them; one all-reduce follows
attention and one the MLP, in either direction. Norms, embedding and head are computed whole by every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
"""Linear layers whose outputs are split, with their biases."""
ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""Linear layers whose inputs are split; a bias is added once."""
OF_HEADS = ("self_attn.q_norm", "self_attn.k_norm")
"""Modules that every rank applies to its own heads, with the same weight."""


def split_layers(layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Split the linear layers in place, without communication; ``meta`` layers work.

    Args:
        layers: decoder layers of a type in ``layouts.TENSOR_PARALLEL_TYPES``, equal on all ranks.
        mesh: one-dimensional, the ranks of the group.
    """
    # The input of attention and MLP becomes a DTensor once, so that its gradient is reduced once.
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        **{name: ColwiseParallel() for name in COLUMNS},
        **{name: RowwiseParallel() for name in ROWS},
    }
    for layer in layers:
        parallelize_module(layer, mesh, plan, src_data_rank=None)


@torch.no_grad()
def reduce_copies(root: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Make the gradients of parameters that are not split whole and equal on every rank of a group.

    Call it once, after the last backward pass of a step. Sharding has summed the gradients of embedding, final norm and
    head over all ranks, so those of a group are averaged here. Layers are summed over the ranks of equal parts only.
    Norms of heads have a part of their gradient on each rank, and the parts are added up. The other copies have the
    same gradient up to rounding, and their average keeps them from drifting apart.

    Args:
        root: the module that contains the layers, sharded.
        layers: the layers that ``split_layers`` split.
        mesh: one-dimensional, the ranks of the group.
    """
    size = mesh.size()
    copies = {
        f"{number}.{name}": parameter
        for number, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
    }
    inside = set(copies.values())
    for parameter in root.parameters():
        if parameter not in inside and parameter.grad is not None:
            _local(parameter.grad).div_(size)
    found = {
        name: _local(parameter.grad)
        for name, parameter in copies.items()
        if parameter.grad is not None and not _is_split(parameter, mesh)
    }
    if not found:
        return
    reduced = torch.cat([gradient.reshape(-1) for gradient in found.values()])
    dist.all_reduce(reduced, group=mesh.get_group())
    parts = torch.split(reduced, [gradient.numel() for gradient in found.values()])
    for (name, gradient), part in zip(found.items(), parts, strict=True):
        is_sum = any(f".{module}." in name for module in OF_HEADS)
        gradient.copy_((part if is_sum else part / size).view_as(gradient))


def _is_split(parameter: Tensor, mesh: DeviceMesh) -> bool:
    """Whether the ranks of the group hold different parts."""
    if not isinstance(parameter, DTensor):
        return False
    names, of_group = parameter.device_mesh.mesh_dim_names, mesh.mesh_dim_names
    assert names is not None, "FSDP and DTensor keep the names"
    assert of_group is not None, "sharding.join_ranks names every dimension"
    return of_group[0] in names and not parameter.placements[names.index(of_group[0])].is_replicate()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
