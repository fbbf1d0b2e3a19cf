"""The ranks of one trainer: process group, device mesh and fully sharded modules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types.boxes import Box, extent, full_box, slices
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_hf.ring_attention import RingGroup
from chatlearn_hf.token_group import TokenGroup
from chatlearn_hf.ulysses import UlyssesGroup
from chatlearn_hosting.rendezvous import group_interfaces
from chatlearn_hosting.role_group import RoleGroup, join_role_group
from chatlearn_trainer_kit.weight_loader import blend

_join_number = itertools.count()
"""Makes the names of a mesh's dimensions unique in this process: DTensor remembers meshes and takes equal ones for the
same, whose process groups may be those of a trainer that was closed."""


@dataclass(slots=True)
class RankGroup:
    """The ranks of a trainer, one process each: ``dp_replicate`` x ``dp_shard`` x those that share a batch slice, the
    last varying fastest.
    """

    mesh: DeviceMesh
    """Mesh over which parameters are sharded: (shard,), or (replicate, shard). Ranks that share a slice hold
    shards like all others."""
    layer_mesh: DeviceMesh
    """Mesh over which the parameters of decoder layers are sharded: ``mesh``, or the ranks with the same part of each
    layer."""
    tensor_mesh: DeviceMesh | None
    """The tensor parallel ranks that split the layers; None if each rank computes whole layers."""
    sharing: TokenGroup | None
    """The ranks that share the tokens of each row; None if each rank has whole rows."""
    data_parallel_rank: int
    data_parallel_size: int
    group: RoleGroup

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def leads_slice(self) -> bool:
        """Whether this rank is the first of the ranks that share a batch slice."""
        if self.tensor_mesh is not None:
            return self.tensor_mesh.get_local_rank() == 0
        return self.sharing is None or self.sharing.rank == 0

    def all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce over all ranks, in place."""
        return self.group.all_reduce(values, operation)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.group.barrier()

    def close(self) -> None:
        """Leave the process group. A repeated call does nothing."""
        self.group.close()


def mesh_sizes(options: FSDPOptions, context: RoleContext) -> tuple[int, int, int]:
    """See ``FSDPOptions.mesh_sizes``.

    Raises:
        ConfigError: their product is not the number of ranks.
    """
    try:
        return options.mesh_sizes(context.world_size)
    except ValueError as error:
        raise ConfigError(f"roles.{context.role}.options: {error}") from error


def join_ranks(options: FSDPOptions, context: RoleContext) -> RankGroup:
    """Join the other ranks at ``context.rendezvous``; a single rank needs none.

    An existing process group of the same size is shared.

    Raises:
        ConfigError: the product of the sizes is not the number of ranks.
        BackendError: there is no rendezvous, another process group exists, or a rank did not join in time.
    """
    sizes = mesh_sizes(options, context)
    backend = "cpu:gloo,cuda:nccl" if torch.device(context.device).type == "cuda" else "gloo"
    with group_interfaces(context.rendezvous):
        return _make_meshes(options, context, sizes, join_role_group(context, backend))


def _make_meshes(
    options: FSDPOptions, context: RoleContext, sizes: tuple[int, int, int], group: RoleGroup
) -> RankGroup:
    replicate, shard, per_slice = sizes
    kind = torch.device(context.device).type
    number, is_copied = next(_join_number), replicate > 1 or options.zero_stage == 0
    both, tensor = (f"replicate_{number}", f"shard_{number}"), f"tensor_{number}"
    if options.zero_stage == 0:  # ranks that share a slice hold copies, too
        mesh = init_device_mesh(kind, (context.world_size, 1), mesh_dim_names=both)
    elif is_copied:
        mesh = init_device_mesh(kind, (replicate, shard * per_slice), mesh_dim_names=both)
    else:
        mesh = init_device_mesh(kind, (shard * per_slice,), mesh_dim_names=both[1:])
    layer_mesh, tensor_mesh, sharing = mesh, None, None
    if options.tensor_parallel > 1:
        of_layers = init_device_mesh(kind, sizes, mesh_dim_names=(*both, tensor))
        layer_mesh, tensor_mesh = of_layers[both if is_copied else both[1]], of_layers[tensor]
    elif per_slice > 1:
        rows = init_device_mesh(kind, (replicate * shard, per_slice), mesh_dim_names=("slice", "row"))
        sharing = (RingGroup if options.ring > 1 else UlyssesGroup)(rows.get_group("row"))
    return RankGroup(mesh, layer_mesh, tensor_mesh, sharing, context.rank // per_slice, replicate * shard, group)


def shard_model(
    root: nn.Module,
    layers: list[nn.Module],
    mesh: DeviceMesh,
    layer_mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype | None,
    cpu_offload: bool,
    gathers_once: bool = False,
    also_forward: Sequence[str] = (),
) -> None:
    """Shard ``root`` in place, each layer as a separate unit, with gradients *summed* over ranks.

    Args:
        root: the module that the trainer calls.
        layers: modules inside it that are gathered one at a time.
        mesh: (shard,), or (replicate, shard).
        layer_mesh: like ``mesh``, for the layers.
        compute_dtype: gather and compute in this dtype, reduce gradients in float32; None uses the parameters' dtype.
        cpu_offload: keep the shards in host memory.
        gathers_once: leave layers gathered after a forward pass, see ``prepare_backward``.
        also_forward: methods of ``root`` other than ``forward`` that compute with whole parameters.
    """
    precision = (
        MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        if compute_dtype is not None
        else MixedPrecisionPolicy()
    )
    offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    for module, over in [*((layer, layer_mesh) for layer in layers), (root, mesh)]:
        # None: FSDP reshards layers after forward, but not the root.
        reshard = False if gathers_once else None
        fully_shard(module, mesh=over, mp_policy=precision, offload_policy=offload, reshard_after_forward=reshard)
        assert isinstance(module, FSDPModule)
        # FSDP averages by default, but every loss here is a part of a global sum. gloo has no pre-multiplied sum, so
        # the collective itself must be a plain one.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for method in also_forward:
        register_fsdp_forward_method(root, method)


def prepare_backward(root: nn.Module, *, gathers_once: bool, reduces_once: bool, is_last: bool) -> None:
    """Tell FSDP what follows the next backward pass.

    Args:
        root: a module that ``shard_model`` sharded; others are left alone.
        gathers_once: weights stay gathered until the last micro-batch of a step (ZeRO-2).
        reduces_once: so do gradients, which each rank adds up whole until then, in the dtype of the reduction (ZeRO-1).
        is_last: whether the optimizer step follows.
    """
    if isinstance(root, FSDPModule):
        root.set_reshard_after_backward(is_last or not gathers_once)
        root.set_requires_gradient_sync(is_last or not reduces_once)


def free_gathered(root: nn.Module) -> None:
    """Free the whole parameters that a forward without backward left gathered, and restore the shards.

    FSDP keeps the root's own parameters (embeddings, head) gathered for a backward pass, and with ``gathers_once`` all
    others too. Until then ``root.parameters()`` are the gathered ones, and the shards cannot be moved or streamed.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; collective for a sharded one."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Layers are split before each part is sharded, so shards are gathered first, in a step of their own.
    placements = list(tensor.placements)
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate():
            placements[dimension] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def local_box(tensor: Tensor) -> tuple[Tensor, Box]:
    """Return this rank's part of a tensor, and where it lies in the whole one."""
    box = list(full_box(tensor.shape))
    if not isinstance(tensor, DTensor):
        return tensor, tuple(box)
    # The mesh's last dimension splits first, and the others split its parts, like torch.chunk.
    for number, placement in reversed(list(enumerate(tensor.placements))):
        if placement.is_replicate():
            continue
        size, rank = tensor.device_mesh.size(number), tensor.device_mesh.get_local_rank(number)
        dimension: int = placement.dim  # type: ignore[attr-defined]  # of Shard and _StridedShard, which share no base
        start, stop = box[dimension]
        share = -(-(stop - start) // size)
        box[dimension] = (min(start + rank * share, stop), min(start + (rank + 1) * share, stop))
    local = tensor.to_local()
    assert tuple(local.shape) == extent(tuple(box)), "FSDP and DTensor split like torch.chunk"
    return local, tuple(box)


def is_first_copy(tensor: Tensor, rank: int) -> bool:
    """Whether this rank holds the first copy of its part of a tensor.

    HSDP holds one copy per replica, tensor parallel ranks hold copies of what they do not split, and every rank holds
    unsharded tensors (buffers) whole.
    """
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    if mesh.mesh.numpy().min() > 0:  # the ranks of one part of each layer, and others hold a copy
        return False
    copies = (i for i, placement in enumerate(tensor.placements) if placement.is_replicate())
    return all(mesh.get_local_rank(i) == 0 for i in copies)


def gradient_norm(gradients: Sequence[Tensor], ranks: RankGroup | None, rank: int, device: torch.device) -> Tensor:
    """Return the norm of gradients over all ranks, each element counted once.

    Args:
        gradients: this rank's gradients, perhaps sharded.
        ranks: all ranks; None if there is one.
        rank: this rank.
        device: device of the result.
    """
    own = [local_box(gradient)[0] for gradient in gradients if is_first_copy(gradient, rank)]
    norm = torch.nn.utils.get_total_norm(own).to(device)
    if ranks is None or ranks.size == 1:
        return norm
    return ranks.all_reduce(norm.double().square(), dist.ReduceOp.SUM).sqrt().to(norm.dtype)


def clip_gradients(gradients: Sequence[Tensor], limit: float, norm: Tensor) -> None:
    """Scale gradients in place so that their norm becomes at most ``limit``, like
    ``torch.nn.utils.clip_grads_with_norm_``, which takes tensors of one mesh alone.

    Args:
        gradients: this rank's gradients, perhaps sharded, over any meshes.
        limit: the greatest norm.
        norm: their norm over all ranks.
    """
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        local, _ = local_box(gradient)
        local.mul_(factor.to(local.device))


def copy_whole(source: Tensor, target: Tensor, decay: float = 0.0) -> None:
    """Write a whole tensor, which every rank has, into a live one; each rank keeps its part without communication.

    Args:
        source: the whole tensor.
        target: the live, perhaps sharded tensor.
        decay: see ``blend``.
    """
    with torch.no_grad():
        if not isinstance(target, DTensor):
            blend(source, target, decay)
            return
        local, box = local_box(target.detach())
        blend(source[slices(box)], local, decay)


def box_of_rows(view: Tensor, rows: tuple[int, int], row_elements: int) -> tuple[int, int]:
    """Return the rows of ``view`` inside rows [start, stop) of the contiguous tensor it is a view of.

    Args:
        view: a view of the whole tensor (``meta`` is enough).
        rows: [start, stop) of the whole tensor's first dimension.
        row_elements: number of elements in such a row.

    Returns:
        [start, stop) in the view's first dimension; empty if there are none.
    """
    first, last = rows[0] * row_elements, rows[1] * row_elements
    offset, step = view.storage_offset(), view.stride(0)
    extent = 1 + sum((n - 1) * s for n, s in zip(view.shape[1:], view.stride()[1:], strict=True))
    inside = [i for i in range(view.shape[0]) if offset + i * step >= first and offset + i * step + extent <= last]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)
