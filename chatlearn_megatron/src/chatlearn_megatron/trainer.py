"""The trainer ``megatron``, one object per rank: Megatron-Core's model, schedules and optimizer on packed rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.plugins.records import Export
from chatlearn_core.protocols import Loss, MemoryPart, RoleContext, WeightLoader
from chatlearn_core.types import (
    FileFacts,
    Metric,
    Metrics,
    OutputRequest,
    Outputs,
    Payload,
    TrainBatch,
    WeightManifest,
    WeightShard,
)
from chatlearn_hf.lora import LoraSettings
from chatlearn_hf.token_outputs import TokenOutputs
from chatlearn_hf.varlen_attention import PackedLayout
from chatlearn_hf.weight_export import adapter_manifest
from chatlearn_megatron import checkpoint
from chatlearn_megatron.attention import PackedRows
from chatlearn_megatron.engine_arguments import check_engine_arguments, native
from chatlearn_megatron.model import MegatronModel, build_model
from chatlearn_megatron.options import MegatronOptions
from chatlearn_megatron.parallel import MegatronRanks, join_ranks
from chatlearn_megatron.weight_loader import LoadingHooks, PieceLoader
from chatlearn_megatron.weights import (
    Holders,
    draw_adapters,
    export_model,
    find_holders,
    manifest_of,
    read_weights,
    stream_adapter,
    stream_boxes,
    stream_full,
)
from chatlearn_trainer_kit.finite_updates import all_finite, refused_update
from chatlearn_trainer_kit.micro_batching import MicroBatches
from chatlearn_trainer_kit.rank_trainer import RankTrainer
from chatlearn_trainer_kit.schedule import learning_rate
from chatlearn_trainer_kit.timing import PhaseTimer

_DUMMY_TOKENS = 2
"""Tokens that an empty row computes; see ``TokenOutputs.of_two_tokens``."""


@dataclass(slots=True, frozen=True)
class _Row:
    """A micro-batch as this rank's stages compute it."""

    batch: TrainBatch
    token_ids: Tensor
    """[T] int64, with the tokens that pad the row."""
    packed: PackedRows
    own: PackedLayout
    """Layout of the batch's sequences only; for an empty batch, of two dummy tokens."""


class MegatronTrainer(RankTrainer[MegatronModel, MegatronOptimizer]):
    """Implements ``chatlearn_core.protocols.Trainer``.

    Rows are packed and may differ in length. Losses are sums with a global denominator, so nothing averages: neither
    Megatron-Core's schedule over micro-batches, nor its reduction of gradients over ranks.
    """

    def __init__(self, options: MegatronOptions, context: RoleContext) -> None:
        super().__init__(options, context)
        check_engine_arguments(context.role, context.engine_arguments)
        try:
            self._data_parallel_size = options.data_parallel(context.world_size)
        except ValueError as error:
            raise ConfigError(f"roles.{context.role}.options: {error}") from error
        self.options = options
        self._ranks: MegatronRanks | None = None
        self._holders: Holders | None = None
        self._replicas: list[Any] = []
        """Of each chunk, Megatron-Core's wrapper that holds and reduces its gradients; the chunk itself if nothing
        learns."""
        self._is_stale = False
        """Whether an update may have left weights to be gathered during the next forward pass."""

    # Lifecycle

    def setup(self) -> None:
        """Join the ranks, build this rank's layers, read its parts of the weights, and create the optimizer."""
        options, context = self.options, self.context
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        self._use_device()
        self._ranks = join_ranks(options, context)
        torch.manual_seed(context.seed + context.rank)
        model = build_model(options, context, self._source, self._ranks)
        for chunk in model.chunks:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(context.trainable and model.trains(name))
        self._replicas = [self._replica(model, chunk) for chunk in model.chunks]
        self._model = model
        self._holders = find_holders(model)
        self._zero_padding(model)
        read_weights(model, self._source, context.seed)
        draw_adapters(model, context.seed)
        if context.trainable:
            self._optimizer = self._build_optimizer()
        self._ranks.barrier()

    def close(self) -> None:
        self._model = None
        self._holders = None
        self._optimizer = None
        self._replicas = []
        self._parts.discard()
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    # Trainer

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's batch slice; tensor, context and pipeline parallel ranks share a slice."""
        inner = self.options.tensor_parallel * self.options.context_parallel
        return self.context.rank // inner % self._data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        return self._data_parallel_size

    def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """See the protocol. Per-token outputs are [T] (``hidden_states`` [T, H]), ``scores`` [S].

        All ranks that share a slice return the same outputs.
        """
        model = self._ready("weights", settled=False)
        for replica in self._replicas:
            replica.eval()
        cut = self._cut(batch)

        def outputs_of(row: _Row, hidden: Tensor) -> Outputs:
            return {
                name: tensor.detach().to("cpu") for name, tensor in self._outputs(model, row, hidden, request).items()
            }

        def step(rows: Iterator[_Row], chunk: Any) -> tuple[Tensor, Any]:
            row = next(rows)
            hidden = model.hidden(chunk, row.token_ids, row.packed)
            return hidden, lambda states, **_: outputs_of(row, states)

        with torch.no_grad():
            pieces = self._run(step, cut, forward_only=True, collect_non_loss_data=True)
        ranks = self._require_ranks()
        outputs = cut.in_batch_order(pieces) if ranks.is_last_stage else None
        return ranks.broadcast_from_last_stage(outputs)

    def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """See the protocol. Adds ``timing_s/forward|backward|optimizer`` and
        ``perf/micro_batches|tokens|computed_tokens``. ``forward`` is the time of this rank's stages; ``backward`` the
        rest of the schedule, and with several stages includes waiting for them.

        Of the ranks that share a slice, only one of the last stage returns metrics.
        """
        self._ready("weights", "gradients", "optimizer", settled=False)
        optimizer = self._require_optimizer()
        timer = PhaseTimer(self._device)
        cut = self._cut(batch)
        losses, parts = self._accumulate(cut, loss, timer)
        with timer.phase("optimizer"):
            optimizer.prepare_grads()
            grad_norm = float(optimizer.get_grad_norm())
        if not all_finite([*losses, grad_norm], self._all_agree):
            raise self._refused(cut, loss, losses, grad_norm)
        with timer.phase("optimizer"), self._guarding_weights(f"optimizer step {self._updates}"):
            rate = learning_rate(self.options, self._updates, self.context.total_updates)
            self._step(optimizer, rate, grad_norm)
        self._updates += 1
        return self._metrics(cut, losses, grad_norm, rate, parts, _phases(timer))

    def save(self, directory: Path) -> Mapping[str, FileFacts]:
        model = self._ready("weights", "optimizer")
        return checkpoint.save(directory, self._state(model))

    def load(self, directory: Path) -> None:
        model = self._ready("weights", "optimizer", may_be_broken=True)
        state = self._state(model)
        with self._guarding_weights(f"loading {directory}"):
            checkpoint.load(directory, state)
        self._updates = state.updates

    def load_model(self, directory: Path, *, fresh_optimizer: bool = True, decay: float = 0.0) -> None:
        model = self._ready("weights", "optimizer", may_be_broken=True)
        with self._guarding_weights(f"loading the model {directory}"):
            read_weights(model, replace(self._source, path=str(directory)), self.context.seed, decay)
            self._take_weights(fresh_optimizer)
        self._require_ranks().barrier()

    def weight_loader(self, decay: float) -> WeightLoader | None:
        """See ``WeightTakingTrainer``."""
        # An average needs intact weights.
        hooks = LoadingHooks(
            lambda: self._ready("weights", "optimizer", may_be_broken=decay == 0.0), self._taken, self._break_weights
        )
        return PieceLoader(self._name, self._ready(may_be_broken=True), decay, hooks)

    def export_model(self, directory: Path) -> None:
        model = self._ready("weights")
        export_model(model, self._require_holders(), self._source, directory)
        self._require_ranks().barrier()

    def manifest(self, payload: Payload = "full") -> WeightManifest:
        model = self._ready()
        if payload == "adapter":
            return adapter_manifest(model.hf, self._adapter_settings(), model.config.params_dtype)
        return manifest_of(model)

    def weights(self, export: Export = "full_tensors", payload: Payload = "full") -> Iterator[WeightShard]:
        """Stream the weights under checkpoint names, tied ones once. Collective.

        ``full_tensors``: every rank gathers every tensor in the same order and yields it whole; the owner, which sends
        it, changes from tensor to tensor so that all ranks own about as many bytes. ``boxes``: every rank yields the
        parts of its own layers and experts, without communication. Payload ``adapter``: the whole adapters, owned by
        rank 0.
        """
        model = self._ready("weights")
        if payload == "adapter":
            self._adapter_settings()
            return stream_adapter(model, self._require_holders())
        if export == "boxes":
            return stream_boxes(model, self._require_holders())
        return stream_full(model, self._require_holders())

    # Internal methods

    def _adapter_settings(self) -> LoraSettings:
        if self.options.lora is None:
            raise BackendError(
                f"trainer role {self.context.role!r}: payload 'adapter' was requested, but the role trains the weights"
                " themselves; set options.lora, or weight_sync.payload: full"
            )
        return LoraSettings.of(self.options.lora)

    def _replica(self, model: MegatronModel, chunk: Any) -> Any:
        if not self.context.trainable:
            return chunk
        options = self.options
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=options.shards_optimizer,
            overlap_grad_reduce=options.overlap,
            overlap_param_gather=options.gathers_late,
            **native(self.context.engine_arguments, "ddp"),
        )
        return DistributedDataParallel(model.config, settings, chunk)

    def _build_optimizer(self) -> MegatronOptimizer:
        options, model = self.options, self._ready()
        settings = OptimizerConfig(
            optimizer="adam" if options.optimizer == "adamw" else "sgd",
            lr=options.learning_rate,
            weight_decay=options.weight_decay,
            adam_beta1=options.adam_beta1,
            adam_beta2=options.adam_beta2,
            adam_eps=options.adam_epsilon,
            sgd_momentum=options.momentum,
            clip_grad=0.0,  # clipped here, after the norm was checked
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=options.shards_optimizer,
            overlap_param_gather=options.gathers_late,
            **native(self.context.engine_arguments, "optimizer"),
        )
        is_vector = ParamPredicate(name="norms and biases", fn=lambda parameter: parameter.dim() <= 1)
        optimizer = get_megatron_optimizer(
            settings, self._replicas, {ParamKey(name="*", predicate=is_vector): ParamGroupOverride(wd_mult=0.0)}
        )
        if options.optimizer == "sgd":
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                part.init_state_fn = checkpoint.allocate  # Megatron-Core has none for the momentum of sgd
        for group in optimizer.param_groups:
            group["weight_decay"] = options.weight_decay * group["wd_mult"]
        config = model.config
        config.finalize_model_grads_func = _finalize_without_averaging
        if options.overlap:
            config.no_sync_func = [replica.no_sync for replica in self._replicas]
            if len(self._replicas) == 1:
                config.no_sync_func = config.no_sync_func[0]
        return optimizer

    def _zero_padding(self, model: MegatronModel) -> None:
        """Set rows that pad the vocabulary to zero; the checkpoint has no values for them."""
        with torch.no_grad():
            for chunk in model.chunks:
                for name, parameter in chunk.named_parameters():
                    if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                        parameter.zero_()

    def _cut(self, batch: TrainBatch) -> MicroBatches:
        options = self.options

        def agree(count: int) -> int:
            """Return the largest count of all ranks; the interleaved schedule needs a multiple of the stages."""
            largest = self._max_count(count)
            stages = options.pipeline_parallel if options.virtual_pipeline > 1 else 1
            return -(-largest // stages) * stages

        return MicroBatches(batch, options.max_tokens_per_micro_batch, share_prompts=False, agree=agree)

    def _row_lengths(self, cut: MicroBatches) -> list[int]:
        """Return the number of tokens of each row, such that they can be split over ranks.

        Rows of the interleaved schedule all have the length of the longest.
        """
        options = self.options
        shares = options.context_parallel * (options.tensor_parallel if options.sequence_parallel else 1)
        tokens = [sum(cut.batch.lengths[index] for index in part) or _DUMMY_TOKENS for part in cut]
        lengths = [-(-count // shares) * shares for count in tokens]
        return [max(lengths)] * len(lengths) if options.virtual_pipeline > 1 else lengths

    def _rows(self, cut: MicroBatches) -> Iterator[_Row]:
        """Yield each micro-batch on the device, padded to its row's length."""
        model, ranks = self._ready(), self._require_ranks()
        for (micro, _), row_length in zip(cut.on(self._device), self._row_lengths(cut), strict=True):
            # An empty row computes dummy tokens, because other ranks wait in its collectives.
            lengths = list(micro.lengths) if micro.num_tokens else [_DUMMY_TOKENS]
            tokens = micro.token_ids if micro.num_tokens else micro.token_ids.new_zeros(_DUMMY_TOKENS)
            padding = row_length - len(tokens)
            padded = PackedLayout([*lengths, padding] if padding else lengths, self._device, ranks.context)
            tokens = torch.cat([tokens, tokens.new_zeros(padding)]) if padding else tokens
            yield _Row(micro, tokens, model.rows(padded), PackedLayout(lengths, self._device, ranks.context))

    def _outputs(self, model: MegatronModel, row: _Row, hidden: Tensor, request: OutputRequest) -> Outputs:
        call = TokenOutputs.requested(request, row.batch)
        call.check(model.head, row.batch.token_ids, model.vocab_size)
        if model.head == "lm":
            self._wait_for_head(model)
        tokens = row.token_ids[: row.own.num_tokens]
        if row.batch.num_tokens:
            return call.of(hidden, tokens, row.own, model.score, model.logprobs)
        outputs = call.of_two_tokens().of(hidden, tokens, row.own, model.score, model.logprobs)
        return {name: tensor[:0].clone() for name, tensor in outputs.items()}

    def _run(self, step: Any, cut: MicroBatches, **how: Any) -> list[Any]:
        """Run Megatron-Core's schedule over the micro-batches; returns what the last stage computed of each."""
        model = self._ready()
        rows = [self._rows(cut) for _ in self._replicas]
        collected: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=rows if len(rows) > 1 else rows[0],
            model=self._replicas,
            num_microbatches=len(cut),
            seq_length=max(self._row_lengths(cut)),  # of effect in the interleaved schedule only
            micro_batch_size=1,
            **how,
        )
        assert model is self._model, "nothing changes the model while it runs"
        return collected

    def _accumulate(self, cut: MicroBatches, loss: Loss, timer: PhaseTimer) -> tuple[list[float], list[Metrics]]:
        """Run forward and backward of all micro-batches.

        Returns:
            The losses of this rank's micro-batches and the loss's metrics; on other stages than the last, zeros and
            nothing.
        """
        model = self._ready()
        for replica in self._replicas:
            replica.train()
            replica.zero_grad_buffer()
        self._require_optimizer().zero_grad()

        def loss_of(row: _Row, hidden: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Metrics]]:
            with timer.phase("forward"):
                outputs = self._outputs(model, row, hidden, loss.needs)
            with timer.phase("loss"):
                result = loss(outputs, row.batch)
            total = result.total
            if not total.requires_grad:
                # The loss is constant (an empty micro-batch, or everything masked). The graph must still run, because
                # other ranks wait in its collectives.
                total = total + sum((output.sum() for output in outputs.values()), start=total.new_zeros(())) * 0.0
            tokens = torch.zeros((), dtype=torch.int, device=total.device)
            return total, tokens, (result.total.detach().float(), result.metrics)

        def step(rows: Iterator[_Row], chunk: Any) -> tuple[Tensor, Any]:
            row = next(rows)
            with timer.phase("forward"):
                hidden = model.hidden(chunk, row.token_ids, row.packed)
            return hidden, lambda states: loss_of(row, states)

        with timer.phase("schedule"):
            collected = self._run(step, cut, forward_only=False)
        # From here on every forward pass gathers, also if the step is refused.
        self._is_stale = self.options.gathers_late
        if not self._require_ranks().is_last_stage:
            return [0.0] * len(cut), []
        return torch.stack([total for total, _ in collected]).tolist(), [metrics for _, metrics in collected]

    def _step(self, optimizer: MegatronOptimizer, rate: float, grad_norm: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        if self.options.grad_clip is not None:
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                parameters = part.get_parameters()
                if parameters:
                    megatron_optimizer.clip_grad_by_total_norm_fp32(parameters, self.options.grad_clip, grad_norm)
        if not optimizer.step_with_ready_grads():
            raise BackendError(f"{self._name}: Megatron-Core's optimizer refused a step with a finite gradient norm")

    def _refused(self, cut: MicroBatches, loss: Loss, losses: Sequence[float], grad_norm: float) -> BackendError:
        """Drop the gradients; a single rank recomputes each micro-batch alone to find those that caused the failure."""
        sample_ids = [[cut.batch.sample_ids[index] for index in part] for part in cut]
        norms: list[float] | None = None
        if self._require_ranks().size == 1:
            norms = []
            optimizer = self._require_optimizer()
            for part in cut:
                alone = MicroBatches(
                    cut.batch.select(part), self.options.max_tokens_per_micro_batch, share_prompts=False
                )
                self._accumulate(alone, loss, PhaseTimer(self._device))
                optimizer.prepare_grads()
                norms.append(float(optimizer.get_grad_norm()))
        for replica in self._replicas:
            replica.zero_grad_buffer()
        self._require_optimizer().zero_grad()
        return refused_update(self._name, self._updates, losses, grad_norm, sample_ids, norms)

    def _settle_weights(self, model: MegatronModel) -> None:
        """Gather the weights that the last step left to the next forward pass. Collective."""
        if not self._is_stale:
            return
        for replica in self._replicas:
            replica.start_param_sync(force_sync=True)
        self._is_stale = False

    def _wait_for_head(self, model: MegatronModel) -> None:
        """Wait until the head is gathered. Logits are computed by chunks, without the head's module, before whose calls
        Megatron-Core would wait.
        """
        head = model.head_weight
        if self.options.gathers_late and self._optimizer is not None and head.requires_grad:
            self._replicas[-1].param_to_bucket_group[head].finish_param_sync()

    def _take_weights(self, fresh_optimizer: bool) -> None:
        """Make the optimizer go on from weights that were written into the model, with new adapters if it is fresh."""
        if fresh_optimizer:
            draw_adapters(self._ready(may_be_broken=True), self.context.seed)
        if self._optimizer is None:
            self._updates = 0 if fresh_optimizer else self._updates
            return
        if fresh_optimizer:
            self._updates = 0
            checkpoint.clear_optimizer(self._optimizer)
        self._optimizer.reload_model_params()

    def _taken(self) -> None:
        self._take_weights(fresh_optimizer=True)
        self._broken = None

    def _ready(self, *parts: MemoryPart, may_be_broken: bool = False, settled: bool = True) -> MegatronModel:
        """See ``RankTrainer``. With the part ``weights`` they are gathered first, unless ``settled`` is False, as for
        forward passes, which gather while they compute.
        """
        model = super()._ready(*parts, may_be_broken=may_be_broken)
        if "weights" in parts and settled:
            self._settle_weights(model)
        return model

    def _require_ranks(self) -> MegatronRanks:
        assert self._ranks is not None, "the trainer is set up"
        return self._ranks

    def _require_holders(self) -> Holders:
        assert self._holders is not None, "the trainer is set up"
        return self._holders

    def _state(self, model: MegatronModel) -> checkpoint.TrainerState:
        return checkpoint.TrainerState(model, self._optimizer, self._updates, self._device, self.options.lora)

    def _all_tensors(self, part: MemoryPart) -> Iterable[Tensor]:
        if self._model is None:
            return []
        if part == "weights":
            return [*self._model.parameters(), *(buffer for chunk in self._model.chunks for buffer in chunk.buffers())]
        if part == "gradients":
            return [parameter.main_grad for parameter in self._model.parameters() if hasattr(parameter, "main_grad")]
        if part != "optimizer" or self._optimizer is None:
            return []
        weights = {parameter.untyped_storage().data_ptr() for parameter in self._model.parameters()}
        held: list[Tensor] = []
        for optimizer in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            if optimizer.optimizer is None:
                continue
            for group in optimizer.optimizer.param_groups:
                held += [master for master in group["params"] if master.untyped_storage().data_ptr() not in weights]
            for entry in optimizer.optimizer.state.values():
                held += [value for value in entry.values() if isinstance(value, Tensor)]
        return held


def _finalize_without_averaging(models: list[Any], num_tokens: Tensor | None = None, **how: Any) -> None:
    """Reduce gradients; the count of tokens, by which Megatron-Core would divide them, is left out."""
    del num_tokens
    finalize_model_grads(models, None, **how)


def _phases(timer: PhaseTimer) -> Metrics:
    """Return the timing metrics; the schedule's time without forward passes and losses is the backward passes'."""
    metrics = dict(timer.metrics())
    schedule, loss = metrics.pop("timing_s/schedule"), metrics.pop("timing_s/loss", Metric(0.0, 1.0, "sum"))
    forward = metrics["timing_s/forward"]
    rest = max(0.0, schedule.total - forward.total - loss.total)
    return metrics | {"timing_s/backward": Metric(rest, 1.0, "sum")}
