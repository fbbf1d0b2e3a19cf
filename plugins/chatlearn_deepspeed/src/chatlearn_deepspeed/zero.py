"""One model under DeepSpeed's engine: ZeRO's partitions, gathering, gradients and steps.

Everything that reads DeepSpeed's private attributes is here; ``library.TESTED_VERSION`` says of which version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from chatlearn_core.exceptions import ConfigError
from chatlearn_deepspeed.fragments import Fragment
from chatlearn_deepspeed.options import DeepSpeedOptions
from chatlearn_hf.own_head import trunk_of
from chatlearn_hf.packed_forward import PackedModel
from chatlearn_trainer_kit.optimizer import allocate_state, set_learning_rate

NEVER = 1 << 40
HELD = -1
"""Stands for a module that uses a parameter, beside DeepSpeed's ids of modules."""
BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default of ``reduce_bucket_size`` and ``allgather_bucket_size``; smaller models need no larger one."""


class ZeroModel:
    """A model that ZeRO shards over the default process group.

    Without an optimizer, stages 1 and 2 have nothing to shard and the model stays a plain module.
    """

    def __init__(
        self,
        deepspeed: Any,
        packed: PackedModel,
        optimizer: torch.optim.Optimizer | None,
        configuration: Mapping[str, Any],
        *,
        num_ranks: int,
        rank: int,
    ) -> None:
        """Shard the model. Collective.

        Args:
            deepspeed: from ``load_deepspeed``.
            packed: the whole model, equal on every rank.
            optimizer: of its parameters; None if it does not learn.
            configuration: from ``configuration``.
            num_ranks: number of ranks.
            rank: this rank.
        """
        self.packed = packed
        self.optimizer = optimizer
        self.stage = int(configuration["zero_optimization"]["stage"])
        self._deepspeed = deepspeed
        self._num_ranks, self._rank = num_ranks, rank
        self._engine: Any = None
        self._zero: Any = None
        if optimizer is not None or self.stage == 3:
            self._engine, *_ = deepspeed.initialize(
                model=packed, optimizer=optimizer, config=dict(configuration), dist_init_required=False
            )
            self._zero = self._engine.optimizer
        self.head_parameters: list[nn.Parameter] = []
        """With ZeRO-3 the parameters outside the trunk: whole inside a pass of ``module`` and in ``head_gathered``."""
        if self.stage == 3:
            self._gather_head_once()

    # Computing

    @property
    def module(self) -> PackedModel:
        """What to call for a forward pass: DeepSpeed's engine, which passes everything on, or the plain model."""
        module: PackedModel = self._engine if self._engine is not None else self.packed
        return module

    def backward(self, total: Tensor, *, is_last: bool) -> None:
        """Add the gradients of a micro-batch, *summed* over ranks: DeepSpeed averages them, so the loss is scaled."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(total * self._num_ranks, scale_wrt_gas=False)

    def grad_norm(self) -> Tensor:
        """Return the norm over all ranks after the last micro-batch; infinite if a gradient is not finite."""
        utils = self._deepspeed.runtime.utils
        if self.stage == 3:
            norm = utils.combine_grad_norm_groups(self._zero._get_norm_groups())
        else:
            norm = self._zero.scaled_global_norm()
        return torch.as_tensor(norm)

    def step(self, rate: float) -> None:
        """Clip, update the weights and drop the gradients."""
        assert self.optimizer is not None, "only a model that learns makes steps"
        set_learning_rate(self.optimizer, rate)
        self._engine.step()
        assert not self._zero.overflow, "gradients were finite"

    def drop_gradients(self) -> None:
        """Forget all gradients, as DeepSpeed does when it skips a step."""
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        if self.stage == 3:
            zero._pre_step()
            zero.averaged_gradients = {}
            if zero.offload_optimizer:
                zero.reset_cpu_buffers()
            return
        zero.micro_step_id = -1
        zero._release_preflattened_grad_buffers()
        if zero.cpu_offload:
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()
        for kept in (zero.averaged_gradients, zero.all_grad_tensors):  # each is filled at another time
            kept.update(dict.fromkeys(kept))

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[object]:
        """Return a context in which these parameters are whole on every rank. Collective."""
        if self.stage != 3:
            return nullcontext()
        gathered: AbstractContextManager[object] = self._deepspeed.zero.GatheredParameters(
            list(parameters), modifier_rank=None
        )
        return gathered

    @contextmanager
    def head_gathered(self) -> Iterator[None]:
        """Keep the head whole in forward passes of parts of the model. Collective."""
        with self.gathered(self.head_parameters) if self.head_parameters else nullcontext():
            parameters: list[Any] = list(self.head_parameters)
            for parameter in parameters:  # otherwise a tied embedding would free it after its own forward pass
                parameter.ds_active_sub_modules.add(HELD)
            try:
                yield
            finally:
                for parameter in parameters:
                    parameter.ds_active_sub_modules.discard(HELD)

    def free_gathered(self) -> None:
        """Free whole parameters that a forward pass without backward left gathered, apart from those that DeepSpeed
        keeps on every rank (``stage3_param_persistence_threshold``)."""
        if self.stage == 3:
            offload = self._parameter_offload
            offload.get_param_coordinator().release_and_reset_all(self.packed)

    # Memory

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the model's own names, tied ones once."""
        return dict(self.packed.model.named_parameters())

    def whole_numel(self, parameter: nn.Parameter) -> int:
        """Number of elements of the whole parameter."""
        return int(getattr(parameter, "ds_numel", parameter.numel()))

    def fragments(self) -> dict[str, Fragment]:
        """Return what this rank holds of each tensor of the model's state, by the model's own names."""
        found: dict[str, Fragment] = {}
        for name, parameter in self.parameters().items():
            fragment = self._sharded(name, parameter) if self.stage == 3 else self._cut_from_group(name, parameter)
            if fragment is not None:
                found[name] = fragment
        names = set(self.packed.model.state_dict())
        for name, buffer in self.packed.model.named_buffers():
            if name in names:
                found[name] = Fragment(name, tuple(buffer.shape), 0, buffer.view(-1), is_first=self._rank == 0)
        return found

    def allocate_moments(self) -> None:
        """Give the optimizer its initial state, for loading into."""
        assert self.optimizer is not None, "only a model that learns has moments"
        allocate_state(self.optimizer, self._partitions())

    def clear_moments(self) -> None:
        """Forget the optimizer's state."""
        if self.optimizer is None:
            return
        self.optimizer.state.clear()
        if self.stage != 3:
            self._zero._hp_optimizer_states_linked = False
            for parameter in self.parameters().values():
                if getattr(parameter, "_hp_mapping", None) is not None:
                    parameter._hp_mapping.optim_fragment = None  # type: ignore[attr-defined]  # DeepSpeed's

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the weights that the model computes with equal the master weights of all ranks. Collective."""
        if self.stage != 3:
            if self._zero is not None:
                self._zero.update_lp_params()
            return
        offload = self._parameter_offload
        offload.partition_all_parameters()
        if self.optimizer is not None:
            for group in range(len(self._zero.fp16_groups)):
                self._zero._reassign_or_swap_out_partitioned_parameters(group)
        persistent = offload.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    def weight_tensors(self) -> Iterator[Tensor]:
        """Yield the memory of the weights that the model computes with."""
        for parameter in self.packed.parameters():
            yield parameter.data
            if self.stage == 3:
                yield parameter.ds_tensor  # type: ignore[attr-defined]  # DeepSpeed's
        yield from self.packed.buffers()

    def gradient_tensors(self) -> Iterator[Tensor]:
        """Yield the memory of the gradients."""
        yield from (parameter.grad for parameter in self.packed.parameters() if parameter.grad is not None)
        if self.optimizer is None:
            return
        for kept in self._zero.averaged_gradients.values():
            yield from (tensor for tensor in kept or () if isinstance(tensor, Tensor))
        yield from (partition.grad for partition in self._partitions() if partition.grad is not None)
        if self.stage == 3:
            yield self._zero.grad_partitions_flat_buffer

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield the memory of the master weights and of the optimizer's state."""
        if self.optimizer is None:
            return
        for partition in self._partitions():
            yield partition
            yield from (value for value in self.optimizer.state[partition].values() if isinstance(value, Tensor))

    def close(self) -> None:
        """Remove DeepSpeed's hooks. The process group must still exist."""
        if self._engine is not None:
            self._engine.destroy()
        self._engine = self._zero = None

    # Internal methods

    def _gather_head_once(self) -> None:
        """Make the head's parameters belong to the outermost module, which gathers them once a pass.

        A rank calls the head once for each chunk of its own logits. DeepSpeed gathers a module's parameters at each
        call and requires all ranks to call the same modules in the same order, so the head's own hooks are removed.
        """
        trunk = trunk_of(self.packed.model)
        inside = set(trunk.modules())
        for module in self.packed.model.modules():
            if module not in inside and module is not self.packed.model:
                module._forward_pre_hooks.clear()
                module._forward_hooks.clear()
        self.head_parameters = _outside_trunk(self.packed)
        for parameter in self.head_parameters:
            self._deepspeed.zero.register_external_parameter(self.packed, parameter)

    @property
    def _parameter_offload(self) -> Any:
        """DeepSpeed's object that gathers and frees parameters; without an optimizer it is in the optimizer's place."""
        return self._zero.parameter_offload if self.optimizer is not None else self._zero

    def _partitions(self) -> list[Tensor]:
        """Return this rank's flat master weights, one tensor for each group of parameters."""
        zero = self._zero
        partitions: list[Tensor] = (
            zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        )
        return partitions

    def _state(self, partition: Tensor, first: int, count: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the moments of some elements of a partition, and its scalar state."""
        assert self.optimizer is not None, "only a model that learns has partitions"
        state = {k: v for k, v in self.optimizer.state.get(partition, {}).items() if isinstance(v, Tensor)}
        moments = {k: v.narrow(0, first, count) for k, v in state.items() if v.shape == partition.shape}
        return moments, {k: v for k, v in state.items() if v.shape != partition.shape}

    def _cut_from_group(self, name: str, parameter: Any) -> Fragment | None:
        """Stages 1 and 2: whole weights, and a fragment of their flat master weights."""
        shape, whole = tuple(parameter.shape), parameter.data.view(-1)
        if self.optimizer is None or not parameter.requires_grad:
            return Fragment(name, shape, 0, whole, is_first=self._rank == 0)
        mapping = parameter._hp_mapping
        if mapping is None:
            return Fragment(name, shape, 0, whole[:0], copies=((0, whole),))
        partition = self._partitions()[mapping.param_group_index]
        first, count = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
        moments, scalars = self._state(partition, first, count)
        values = partition.detach().narrow(0, first, count)
        return Fragment(name, shape, mapping.lp_fragment_address.start, values, moments, scalars, copies=((0, whole),))

    def _sharded(self, name: str, parameter: Any) -> Fragment:
        """Stage 3: the shard of the weights, and the equal one of their master weights."""
        shape, per_rank = tuple(parameter.ds_shape), int(parameter.partition_numel())
        start = min(self._rank * per_rank, parameter.ds_numel)
        count = min(per_rank, parameter.ds_numel - start)
        shard = parameter.ds_tensor.detach().view(-1)[:count]
        is_whole = parameter.data.numel() == parameter.ds_numel  # kept on every rank, or gathered
        copies: list[tuple[int, Tensor]] = [(0, parameter.data.view(-1))] if is_whole else []
        if self.optimizer is None or not parameter.requires_grad:
            return Fragment(name, shape, start, shard, copies=tuple(copies))
        group, first, _ = self._zero.grad_position[self._zero.get_param_id(parameter)]
        partition = self._partitions()[group]
        moments, scalars = self._state(partition, first, count)
        values = partition.detach().narrow(0, first, count)
        return Fragment(name, shape, start, values, moments, scalars, copies=((start, shard), *copies))


def _outside_trunk(packed: PackedModel) -> list[nn.Parameter]:
    """Return the parameters that compute outputs from hidden states, including a tied embedding."""
    model = packed.model
    inside = {id(parameter) for parameter in trunk_of(model).parameters()}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    head = model.get_output_embeddings() if packed.head == "lm" else None  # type: ignore[no-untyped-call]  # transformers
    tied = [] if head is None else [parameter for parameter in head.parameters() if id(parameter) in inside]
    return [*outside, *tied]


def configuration(
    deepspeed: Any, options: DeepSpeedOptions, native: Mapping[str, Any], role: str, *, num_elements: int
) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    Args:
        deepspeed: from ``load_deepspeed``.
        options: of the role; they decide everything that ``engine_arguments.OWNED`` lists.
        native: DeepSpeed's own settings, from ``native_configuration``.
        role: for messages.
        num_elements: number of elements of the model; buckets are not larger.

    Raises:
        ConfigError: DeepSpeed refuses a setting.
    """
    bucket = min(BUCKET_ELEMENTS, num_elements + num_elements % 2)  # DeepSpeed wants an even number
    zero: dict[str, Any] = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "overlap_comm": False}
    zero |= dict(native.get("zero_optimization", {}))
    zero["stage"] = options.zero_stage
    on_host = {"device": "cpu", "pin_memory": False}
    if options.offload_optimizer:
        zero["offload_optimizer"] = dict(on_host)
    if options.offload_params:
        zero["offload_param"] = dict(on_host)
    try:
        deepspeed.runtime.zero.config.DeepSpeedZeroConfig(**zero)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"roles.{role}.engine.zero_optimization: {error}") from error
    reduced: dict[str, Any] = {}
    if options.param_dtype == "bfloat16":
        reduced = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    return {
        "steps_per_print": NEVER,
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own optimizer for the host must be compiled.
        "zero_force_ds_cpu_optimizer": False,
        **native,
        **reduced,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": options.grad_clip or 0.0,
        "bf16": {"enabled": options.param_dtype == "bfloat16"},
        "zero_optimization": zero,
    }
