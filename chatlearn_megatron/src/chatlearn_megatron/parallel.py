"""The ranks of one trainer in Megatron-Core's parallel state, which is global to a process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.protocols import RoleContext
from chatlearn_hf.ulysses import UlyssesGroup
from chatlearn_hosting.rendezvous import group_interfaces
from chatlearn_hosting.role_group import RoleGroup, join_role_group
from chatlearn_megatron import cpu_compatibility
from chatlearn_megatron.options import MegatronOptions

Sizes = tuple[int, int, int, int, int, int, str]
"""tp, pp, virtual pp, cp, ep, expert tp, and the type of device."""


@dataclass(slots=True)
class _ParallelState:
    """The parallel state of this process, and the trainers that use it."""

    sizes: Sizes
    users: int = 0


_state: _ParallelState | None = None


@dataclass(slots=True, frozen=True)
class Shard:
    """Which part of a matrix a rank holds."""

    rank: int
    size: int


class MegatronRanks:
    """The ranks of a trainer: tensor, context, data and pipeline parallel, the first varying fastest."""

    def __init__(self, group: RoleGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.tensor = parallel_state.get_tensor_model_parallel_group()
        self.pipeline = parallel_state.get_pipeline_model_parallel_group()
        self.expert_tensor = parallel_state.get_expert_tensor_parallel_group()
        self.expert = parallel_state.get_expert_model_parallel_group()
        context = parallel_state.get_context_parallel_group()
        self.context = UlyssesGroup(context) if dist.get_world_size(context) > 1 else None
        """The ranks that share the tokens of a packed row; None if each has all of them."""
        self._closed = False

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def data_parallel_rank(self) -> int:
        return int(parallel_state.get_data_parallel_rank())

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last layers, and with them the head."""
        return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))

    @property
    def leads_slice(self) -> bool:
        """Whether this rank reports the metrics of the ranks that share its batch slice."""
        return self.is_last_stage and self.tensor.rank() == 0 and (self.context is None or self.context.rank == 0)

    def shard(self, *, expert: bool) -> Shard:
        """Return this rank's part of a matrix of the trunk, or of an expert."""
        group = self.expert_tensor if expert else self.tensor
        return Shard(group.rank(), group.size())

    def all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce over all ranks, in place."""
        return self._group.all_reduce(values, operation)

    def broadcast_from_last_stage(self, values: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Give every stage the outputs that the last one computed, on the host."""
        if self.pipeline.size() == 1:
            assert values is not None, "a single stage is the last one"
            return values
        content = [values]
        dist.broadcast_object_list(
            content, src=dist.get_global_rank(self.pipeline, self.pipeline.size() - 1), group=self.pipeline
        )
        received = content[0]
        assert received is not None, "the last stage has outputs"
        return received

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the parallel state, and end it if no other trainer of this process uses it."""
        global _state
        if self._closed or _state is None:
            return
        self._closed = True
        _state.users -= 1
        if _state.users == 0:
            parallel_state.destroy_model_parallel()
            _state = None
        self._group.close()


def join_ranks(options: MegatronOptions, context: RoleContext) -> MegatronRanks:
    """Join the other ranks, and set up Megatron-Core's parallel state or share that of another trainer.

    Raises:
        ConfigError: the sizes do not divide the number of ranks.
        BackendError: the ranks cannot meet, or another trainer of this process has other sizes.
    """
    global _state
    try:
        options.data_parallel(context.world_size)
    except ValueError as error:
        raise ConfigError(f"roles.{context.role}.options: {error}") from error
    device = torch.device(context.device)
    cpu_compatibility.complete_without_engine()
    if device.type == "cpu":
        cpu_compatibility.install()
    sizes = (
        options.tensor_parallel,
        options.pipeline_parallel,
        options.virtual_pipeline,
        options.context_parallel,
        options.expert_parallel,
        options.expert_tensor,
        device.type,
    )
    if _state is not None and _state.sizes != sizes:
        raise BackendError(
            f"role {context.role!r} asks for Megatron ranks (tensor, pipeline, virtual pipeline, context, expert,"
            f" expert tensor, device) {sizes}, but another trainer of this process has {_state.sizes}, and"
            " Megatron-Core has one layout per process. Give the roles equal layouts, separate processes (runtime:"
            " ray), or another backend"
        )
    with group_interfaces(context.rendezvous):
        group = join_role_group(context, "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        if _state is None:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=options.tensor_parallel,
                pipeline_model_parallel_size=options.pipeline_parallel,
                virtual_pipeline_model_parallel_size=(
                    options.virtual_pipeline if options.virtual_pipeline > 1 else None
                ),
                context_parallel_size=options.context_parallel,
                expert_model_parallel_size=options.expert_parallel,
                expert_tensor_parallel_size=options.expert_tensor,
                create_gloo_process_groups=True,
            )
            model_parallel_cuda_manual_seed(context.seed, force_reset_rng=True)
            _state = _ParallelState(sizes)
    _state.users += 1
    return MegatronRanks(group, device)
