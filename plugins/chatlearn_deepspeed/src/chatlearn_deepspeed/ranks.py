"""The ranks of one trainer: all of them shard by ZeRO, and neighbours share the tokens of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import RoleContext
from chatlearn_deepspeed.library import forget_communication, start_communication
from chatlearn_deepspeed.options import DeepSpeedOptions
from chatlearn_hf.ring_attention import RingGroup
from chatlearn_hf.token_group import TokenGroup
from chatlearn_hf.ulysses import UlyssesGroup
from chatlearn_hosting.rendezvous import group_interfaces
from chatlearn_hosting.role_group import RoleGroup, join_role_group


@dataclass(slots=True)
class ZeroRanks:
    """The ranks of a trainer, one process each: batch slices x ranks of a row, the last varying fastest."""

    group: RoleGroup
    sharing: TokenGroup | None

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def leads_slice(self) -> bool:
        """Whether this rank is the first of the ranks that share a batch slice."""
        return self.sharing is None or self.sharing.rank == 0

    def all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce over all ranks, in place."""
        return self.group.all_reduce(values, operation)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.group.barrier()

    def close(self) -> None:
        """Leave the process group. A repeated call does nothing."""
        if self.group.close():
            forget_communication()


def check_ranks(options: DeepSpeedOptions, context: RoleContext) -> None:
    """Raises: ConfigError: the ranks that share a row do not divide the role's."""
    try:
        options.check_ranks(context.world_size)
    except ValueError as error:
        raise ConfigError(f"roles.{context.role}.options: {error}") from error


def join_ranks(options: DeepSpeedOptions, context: RoleContext) -> ZeroRanks:
    """Join the other ranks at ``context.rendezvous``; DeepSpeed needs a process group even for a single rank.

    Raises:
        BackendError: there is no rendezvous, another process group exists, or a rank did not join in time.
    """
    device = torch.device(context.device)
    with group_interfaces(context.rendezvous):
        group = join_role_group(context, "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        start_communication(device)
        sharing: TokenGroup | None = None
        if options.ranks_per_row > 1:
            sizes = (context.world_size // options.ranks_per_row, options.ranks_per_row)
            slices = init_device_mesh(device.type, sizes, mesh_dim_names=("slice", "row"))
            sharing = (RingGroup if options.ring > 1 else UlyssesGroup)(slices.get_group("row"))
    return ZeroRanks(group, sharing)
