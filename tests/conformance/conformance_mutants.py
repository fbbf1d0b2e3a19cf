"""First-party backends, each wrapped so that it breaks one rule, with the contract test that must fail.

Loaded under this module's own name (see conftest.py), so that records can name the mutants by import string.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from chatlearn_core.exceptions import BackendTimeoutError
from chatlearn_core.plugins.records import PluginRecord
from chatlearn_core.protocols import LossOutput, PlainData
from chatlearn_core.types import (
    KEPT_IDS,
    RAW_BASIS,
    Completion,
    RewardResult,
    TrainBatch,
    VersionSpan,
    WeightManifest,
    WeightShard,
)
from chatlearn_core.types.boxes import lies_in
from chatlearn_fsdp.trainer import FSDPTrainer
from chatlearn_local.runtime import LocalRuntime, LocalTrainer
from chatlearn_rewards.function_reward import FunctionReward
from chatlearn_sync.checkpoint import CheckpointReceiver, CheckpointSender
from chatlearn_sync.direct import DirectReceiver, DirectSender
from chatlearn_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender
from chatlearn_sync.stream import StreamCheck
from chatlearn_transformers.generator import TransformersGenerator
from chatlearn_transformers.weight_loader import TransformersWeightLoader

# Trainers


class ShiftedLogprobs(FSDPTrainer):
    """Logprobs one entry early, as if labels had not been shifted."""

    def compute(self, batch, request):
        outputs = super().compute(batch, request)
        return outputs | {"logprobs": outputs["logprobs"].roll(-1)}


class CrossingSequences(FSDPTrainer):
    """Attention crosses the borders of packed sequences."""

    def compute(self, batch, request):
        one = replace(
            batch.select(range(batch.num_sequences)),
            cu_seqlens=torch.tensor([0, batch.num_tokens], dtype=torch.int32),
            sample_ids=("all",),
            unit_index=torch.zeros(1, dtype=torch.int64),
        )
        return super().compute(one if batch.num_tokens else batch, request)


class IgnoredTemperature(FSDPTrainer):
    """Logprobs at temperature 1, whatever was asked for."""

    def compute(self, batch, request):
        return super().compute(batch, replace(request, temperature=1.0))


class WrongOrder(FSDPTrainer):
    """Micro-batches' outputs are not put back into the batch's order."""

    def compute(self, batch, request):
        order = [index for cut in self._cut(batch) for index in cut]
        outputs = super().compute(batch, request)
        if not order or set(outputs) & {"scores"}:
            return outputs
        return {name: _in_order(batch, values, order) for name, values in outputs.items()}


class DroppedMask(FSDPTrainer):
    """The loss sees a mask that is all True."""

    def update(self, batch, loss):
        return super().update(replace(batch, loss_mask=torch.ones_like(batch.loss_mask)), loss)


class _ScaledLoss:
    def __init__(self, loss, scale):
        self._loss, self._scale = loss, scale
        self.needs, self.unit = loss.needs, loss.unit

    def __call__(self, outputs, batch):
        result = self._loss(outputs, batch)
        return LossOutput(result.total * self._scale, result.metrics)


class ScaledByMicroBatches(FSDPTrainer):
    """The loss is divided by the number of micro-batches, as gradient accumulation of means would be."""

    def update(self, batch, loss):
        return super().update(batch, _ScaledLoss(loss, 1 / max(1, len(self._cut(batch)))))


class HiddenScale(FSDPTrainer):
    """Twice the gradient under the right loss: clipping and Adam hide it, the norm before clipping does not."""

    def update(self, batch, loss):
        metrics = super().update(batch, _ScaledLoss(loss, 2.0))
        return metrics | {"loss": replace(metrics["loss"], total=metrics["loss"].total / 2)}


class ClippedNorm(FSDPTrainer):
    """Reports the gradient norm after clipping to 0.01."""

    def update(self, batch, loss):
        metrics = super().update(batch, loss)
        return metrics | {"grad_norm": replace(metrics["grad_norm"], total=min(0.01, metrics["grad_norm"].total))}


class SwallowedNonFinite(FSDPTrainer):
    """A loss that is not finite is a step that silently does not happen."""

    def update(self, batch, loss):
        try:
            return super().update(batch, loss)
        except Exception:
            return {}


class Ascent(FSDPTrainer):
    """The gradient's sign is wrong, and the reported loss is right."""

    def update(self, batch, loss):
        metrics = super().update(batch, _ScaledLoss(loss, -1.0))
        return metrics | {"loss": replace(metrics["loss"], total=-metrics["loss"].total)}


class LostOptimizer(FSDPTrainer):
    """A checkpoint without the optimizer's moments."""

    def load(self, directory):
        super().load(directory)
        for state in self._optimizer.state.values():
            for name, tensor in state.items():
                if name != "step":
                    tensor.zero_()


class StaleStream(FSDPTrainer):
    """Streams the weights it had when it first streamed."""

    _kept: list[WeightShard] | None = None

    def setup(self):
        super().setup()
        self._kept = [replace(s, tensor=s.tensor.clone()) for s in super().weights()]

    def weights(self, export="full_tensors"):
        return iter(self._kept) if export == "full_tensors" else super().weights(export)


class OffloadInName(FSDPTrainer):
    """Says that parts are offloaded, and leaves them where they are."""

    def offload(self, parts):
        for name in set(parts) & self._parts._parts.keys():
            self._parts._parts[name].is_offloaded = True


class ReusedBuffer(FSDPTrainer):
    """Every streamed tensor is a view of one buffer, which the next one overwrites."""

    def weights(self, export="full_tensors") -> Iterator[WeightShard]:
        buffer = torch.empty(max(spec.num_elements for spec in self.manifest().tensors.values()))
        for shard in super().weights(export):
            view = buffer[: shard.tensor.numel()].view(shard.tensor.shape)
            yield replace(shard, tensor=view.copy_(shard.tensor))


class WrappedNames(FSDPTrainer):
    """Names carry a wrapper's prefix instead of the checkpoint's."""

    def manifest(self):
        own = super().manifest()
        tensors = {f"module.{n}": replace(s, name=f"module.{n}") for n, s in own.tensors.items()}
        return WeightManifest(tensors, {a: f"module.{n}" for a, n in own.aliases.items()})

    def weights(self, export="full_tensors") -> Iterator[WeightShard]:
        return (replace(shard, name=f"module.{shard.name}") for shard in super().weights(export))


class OwnedByNoRank(FSDPTrainer):
    """Tensors are owned by a rank that is not there."""

    def weights(self, export="full_tensors") -> Iterator[WeightShard]:
        return (replace(shard, owner_rank=1) for shard in super().weights(export))


class ShiftedBoxes(FSDPTrainer):
    """Values are those of a box, and said to lie a row further on; the last row is cut off."""

    def weights(self, export="full_tensors") -> Iterator[WeightShard]:
        for shard in super().weights(export):
            whole = export == "full_tensors" or len(shard.tensor) < 2
            yield shard if whole else _rows(shard, slice(None, -1), (1, 0))


class MissingTail(FSDPTrainer):
    """The last row of every box is not streamed."""

    def weights(self, export="full_tensors") -> Iterator[WeightShard]:
        for shard in super().weights(export):
            yield shard if export == "full_tensors" else _rows(shard, slice(None, -1), (0, -1))


class StaleBoxes(FSDPTrainer):
    """Boxes are those that it had when it first streamed."""

    def weights(self, export="full_tensors"):
        if export == "full_tensors":
            return super().weights(export)
        self._kept = getattr(self, "_kept", None) or [
            replace(s, tensor=s.tensor.clone()) for s in super().weights(export)
        ]
        return iter(self._kept)


class OtherShare(FSDPTrainer):
    """Keeps the share of its own weights that should have come from the sender."""

    def weight_loader(self, decay: float) -> Any:
        return super().weight_loader(1 - decay if decay else decay)


class TrimmedManifest(FSDPTrainer):
    """The manifest lacks the last tensor."""

    def manifest(self):
        own = super().manifest()
        return WeightManifest(dict(list(own.tensors.items())[:-1]), own.aliases)


class StaleManifest(FSDPTrainer):
    """The manifest is that of the model before it was cast."""

    def manifest(self):
        own = super().manifest()
        return WeightManifest({n: replace(s, dtype="bfloat16") for n, s in own.tensors.items()}, own.aliases)


def _rows(shard: WeightShard, kept: slice, moved: tuple[int, int]) -> WeightShard:
    """Some rows of a shard, and its box moved."""
    (start, stop), *rest = shard.box
    return replace(shard, box=((start + moved[0], stop + moved[1]), *rest), tensor=shard.tensor[kept])


# Generators


class StaleVersion(TransformersGenerator):
    """Completions carry the version before the one that sampled them."""

    async def generate(self, request, on_tokens=None):
        completion = await super().generate(request, on_tokens)
        spans = tuple(VersionSpan(s.start, s.stop, max(0, s.version - 1)) for s in completion.version_spans)
        return replace(completion, version_spans=spans)


class WrongBasis(TransformersGenerator):
    """Raw logprobs under the name of the processed distribution."""

    async def generate(self, request, on_tokens=None):
        completion = await super().generate(request, on_tokens)
        return replace(completion, logprobs=completion.raw_logprobs)


class UndeclaredBasis(TransformersGenerator):
    """Raw logprobs that say so, from a generator whose record declares processed ones."""

    async def generate(self, request, on_tokens=None):
        completion = await super().generate(request, on_tokens)
        return replace(completion, logprobs=completion.raw_logprobs, basis=RAW_BASIS)


class ShiftedGeneratorLogprobs(TransformersGenerator):
    """Each token has its neighbour's logprob."""

    async def generate(self, request, on_tokens=None):
        completion = await super().generate(request, on_tokens)
        return replace(completion, logprobs=completion.logprobs[::-1].copy())


class IgnoredSeed(TransformersGenerator):
    """Every request samples with seed 0."""

    async def generate(self, request, on_tokens=None):
        return await super().generate(replace(request, sampling=replace(request.sampling, seed=0)), on_tokens)


class SharedRandomness(TransformersGenerator):
    """Random numbers depend on how many requests came before."""

    _count = 0

    async def generate(self, request, on_tokens=None):
        type(self)._count += 1
        sampling = replace(request.sampling, seed=request.sampling.seed + type(self)._count)
        return await super().generate(replace(request, sampling=sampling), on_tokens)


class LostPartial(TransformersGenerator):
    """An aborted request returns nothing of what it had."""

    async def generate(self, request, on_tokens=None):
        found = await super().generate(request, on_tokens)
        if found.finish_reason != "abort":
            return found
        empty = found.logprobs[:0]
        return Completion(
            found.request_id, found.token_ids[:0], empty, found.basis, "abort", found.sampling, (), empty, ""
        )


class ForgottenPrior(TransformersGenerator):
    """A resumed request starts again with other random numbers."""

    async def generate(self, request, on_tokens=None):
        if request.resume_from is None:
            return await super().generate(request, on_tokens)
        sampling = replace(request.sampling, seed=request.sampling.seed + 1, stop_token_ids=())
        return await super().generate(replace(request, resume_from=None, sampling=sampling), on_tokens)


class SleepInName(TransformersGenerator):
    """Drops the KV cache and refuses work, and keeps the weights where they are."""

    def offload(self, parts):
        super().offload(set(parts) - {"weights"})


class DeafPause(TransformersGenerator):
    """``pause`` does nothing."""

    async def pause(self):
        pass


class OpenDoor(TransformersGenerator):
    """What comes while paused is answered at once."""

    async def generate(self, request, on_tokens=None):
        if self._paused:
            await self.resume()
        return await super().generate(request, on_tokens)


class StaleCache(TransformersGenerator):
    """Unfinished requests go on with the KV cache of the old weights, where the record says that it is recomputed."""

    def setup(self):
        super().setup()
        self._options = self._options.model_copy(update={"kv_after_sync": "kept"})


class SampledInsteadOfScored(TransformersGenerator):
    """Tokens that are given are ignored."""

    async def generate(self, request, on_tokens=None):
        return await super().generate(replace(request, forced_ids=None), on_tokens)


class ShiftedScores(TransformersGenerator):
    """Each given token has the logprob of the one behind it."""

    async def generate(self, request, on_tokens=None):
        completion = await super().generate(request, on_tokens)
        if request.forced_ids is None:
            return completion
        return replace(completion, logprobs=completion.logprobs[[*range(1, len(completion.logprobs)), -1]])


class ScoresAtTemperatureOne(TransformersGenerator):
    """Scores are of the raw distribution, and said to be of the processed one."""

    async def generate(self, request, on_tokens=None):
        completion = await super().generate(request, on_tokens)
        return completion if request.forced_ids is None else replace(completion, logprobs=completion.raw_logprobs)


class ShiftedKeptIds(TransformersGenerator):
    """Each token has the ids that the one behind it was sampled from."""

    async def generate(self, request, on_tokens=None):
        completion = await super().generate(request, on_tokens)
        if not request.sampling.max_kept_ids:
            return completion
        kept = completion.token_data[KEPT_IDS]
        return replace(completion, token_data={**completion.token_data, KEPT_IDS: kept[[*range(1, len(kept)), -1]]})


class MostLikelyIds(TransformersGenerator):
    """The ids that top-k kept, before top-p: sampling cuts both."""

    async def generate(self, request, on_tokens=None):
        if not request.sampling.max_kept_ids:
            return await super().generate(request, on_tokens)
        uncut = replace(request, id=f"{request.id}-uncut", sampling=replace(request.sampling, top_p=1.0))
        other = await super().generate(uncut)
        completion = await super().generate(request, on_tokens)
        return replace(completion, token_data=other.token_data)


class _LoaderMutant(TransformersGenerator):
    """Changes the loader's class once it exists."""

    loader_class: type[TransformersWeightLoader]

    def setup(self):
        super().setup()
        self._loader.__class__ = self.loader_class


class _AcceptingLoader(TransformersWeightLoader):
    async def begin(self, policy_version, manifest):
        await super().begin(policy_version, self._incoming.expected)

    async def load_tensors(self, tensors):
        await super().load_tensors((n, t) for n, t in tensors if n in self._incoming.expected.tensors)

    async def finish(self):
        self._incoming._arrived = set(self._incoming.expected.tensors)
        return await super().finish()


class AcceptedUnknownNames(_LoaderMutant):
    """The manifest is not checked and unknown names are dropped, as some engines do."""

    loader_class = _AcceptingLoader


class _SwappingLoader(TransformersWeightLoader):
    async def load_tensors(self, tensors):
        swapped = {"q_norm": "k_norm", "k_norm": "q_norm"}

        def under_wrong_names():
            for name, tensor in tensors:
                part = next((p for p in swapped if f"layers.0.self_attn.{p}" in name), None)
                yield (name.replace(part, swapped[part]) if part else name), tensor

        await super().load_tensors(under_wrong_names())


class WrongName(_LoaderMutant):
    """Two norms of equal shape are loaded under each other's name."""

    loader_class = _SwappingLoader


class _IgnoringLoader(TransformersWeightLoader):
    async def load_tensors(self, tensors):
        self._incoming._arrived |= {name for name, _ in tensors}


class NeverLoaded(_LoaderMutant):
    """New weights are confirmed and not loaded."""

    loader_class = _IgnoringLoader


class _KeepingLoader(TransformersWeightLoader):
    async def load_tensors(self, tensors):
        given = list(tensors)
        await super().load_tensors(iter(given))
        for name, tensor in given:
            self._model.get_parameter(name).data = tensor


class KeptTensors(_LoaderMutant):
    """The tensors that were given become the parameters, without a copy."""

    loader_class = _KeepingLoader


class _CorneringLoader(TransformersWeightLoader):
    def _place(self, shards):
        for shard in shards:
            extent = tuple(slice(0, size) for size in shard.tensor.shape)
            self._views[shard.name][extent].copy_(shard.tensor)


class MisplacedBoxes(_LoaderMutant):
    """Every box is copied to the beginning of its tensor."""

    loader_class = _CorneringLoader


class _CountingLoader(TransformersWeightLoader):
    async def load_boxes(self, shards):
        known = [shard for shard in shards if lies_in(shard.box, shard.global_shape)]
        self._place(known)
        self._incoming._arrived |= {shard.name for shard in known}


class AcceptedGaps(_LoaderMutant):
    """A tensor of which any box came counts as whole."""

    loader_class = _CountingLoader


class NamelessErrors(TransformersGenerator):
    """Errors do not say which request."""

    async def generate(self, request, on_tokens=None):
        try:
            return await super().generate(request, on_tokens)
        except Exception as error:
            raise type(error)("something went wrong") from None


# Rewards


class WrongRewardOrder(FunctionReward):
    """Results come sorted by value."""

    async def score(self, samples):
        return sorted(await super().score(samples), key=lambda r: -math.inf if r.value is None else r.value)


class SwallowedRewardError(FunctionReward):
    """What cannot be judged gets 0."""

    async def score(self, samples):
        return [r if r.error is None else RewardResult(0.0) for r in await super().score(samples)]


class RaisingReward(FunctionReward):
    """One bad sample raises for all."""

    async def score(self, samples):
        results = await super().score(samples)
        if any(result.error for result in results):
            raise RuntimeError("a sample failed")
        return results


class SlowLeak(FunctionReward):
    """``close`` leaves the worker processes."""

    def close(self):
        if not getattr(self, "_leaked", None):
            self._leaked = True
            return
        # The suite closes once more at the end of a test, so that a failing test leaves no process behind.
        if self._leaked is True:
            self._leaked = "once more"
            return
        super().close()


# Transports


def _streaming(shards):
    """A trainer whose stream passes through ``shards``."""

    class Streamed:
        def __init__(self, trainer):
            self._trainer = trainer

        def weights(self, export="full_tensors"):
            return shards(list(self._trainer.weights(export)))

    return Streamed


class DroppedTensor(DirectSender):
    """The last tensor is not sent, and the manifest is trimmed so that no receiver asks for it."""

    def send(self, plan, trainer):
        return super().send(plan, _streaming(lambda shards: iter(shards[:-1]))(trainer))


class _UncheckedReceiver(DirectReceiver):
    """Takes what comes: its checks are against what was sent."""

    async def receive(self, plan, offers, loader):
        names = sorted(plan.manifest.tensors)[:-1]
        trimmed = WeightManifest({name: plan.manifest.tensors[name] for name in names})
        return await super().receive(dataclasses.replace(plan, manifest=trimmed), offers, loader)


class SwappedNames(DirectSender):
    """Two tensors of one shape and dtype under each other's name."""

    def send(self, plan, trainer):
        def swap(shards):
            names = {"layers.0.norm.weight": "layers.1.norm.weight", "layers.1.norm.weight": "layers.0.norm.weight"}
            return iter([replace(s, name=names.get(s.name, s.name)) for s in shards])

        return super().send(plan, _streaming(swap)(trainer))


class SwallowedSenderError(DirectSender):
    """The trainer's error ends in the sender."""

    def send(self, plan, trainer):
        try:
            return super().send(plan, trainer)
        except RuntimeError:
            return 0


class HangingReceiver(DirectReceiver):
    """A failing loader is taken for a success."""

    async def receive(self, plan, offers, loader):
        try:
            return await super().receive(plan, offers, loader)
        except RuntimeError:
            return 10**9


class StaleSender(DirectSender):
    """Sends the tensors of its first sync for ever."""

    def send(self, plan, trainer):
        self._first = getattr(self, "_first", None) or list(trainer.weights())
        return super().send(plan, _streaming(lambda _: iter(self._first))(trainer))


class RoundedTensors(DirectSender):
    """Float32 passes through bfloat16 on its way."""

    def send(self, plan, trainer):
        def rounded(shards):
            return iter([replace(s, tensor=s.tensor.bfloat16().to(s.tensor.dtype)) for s in shards])

        return super().send(plan, _streaming(rounded)(trainer))


class _ChangingLoader:
    """A loader whose boxes pass through ``change``."""

    def __init__(self, loader, change):
        self._loader, self._change = loader, change

    def __getattr__(self, name):
        return getattr(self._loader, name)

    async def load_boxes(self, shards):
        await self._loader.load_boxes(self._change(shard) for shard in shards)


class ShiftedArrival(SharedMemoryReceiver):
    """Boxes that do not begin at the first row are handed on as if they began a row earlier."""

    async def receive(self, plan, offers, loader):
        def change(shard):
            begins = shard.box and shard.box[0][0] > 0
            return (
                replace(shard, box=tuple((a - 1, b - 1) for a, b in shard.box[:1]) + shard.box[1:]) if begins else shard
            )

        return await super().receive(plan, offers, _ChangingLoader(loader, change))


class TrimmedArrival(SharedMemoryReceiver):
    """The last row of every box is lost on its way into the loader."""

    async def receive(self, plan, offers, loader):
        def change(shard):
            return _rows(shard, slice(None, -1), (0, -1)) if shard.box else shard

        return await super().receive(plan, offers, _ChangingLoader(loader, change))


class UncountedElements(SharedMemoryReceiver):
    """A tensor of which any box came counts as whole."""

    async def receive(self, plan, offers, loader):
        with mock.patch.object(StreamCheck, "complete"):
            return await super().receive(plan, offers, loader)


class MirroredRanks(SharedMemorySender):
    """Ranks count from the last: each says that its rows are those of the rank opposite."""

    def send(self, plan, trainer):
        def mirrored(shards):
            for s in shards:
                size, box = (s.global_shape[0], s.box[0]) if s.box else (0, (0, 0))
                yield replace(s, box=((size - box[1], size - box[0]), *s.box[1:])) if s.box else s

        return super().send(plan, _streaming(mirrored)(trainer))


class FirstManifest(SharedMemoryReceiver):
    """What comes is compared with the manifest of the first sync."""

    async def receive(self, plan, offers, loader):
        self._first = getattr(self, "_first", plan.manifest)
        return await super().receive(replace(plan, manifest=self._first), offers, loader)


class TrustedFiles(CheckpointReceiver):
    """Checksums are never compared."""

    def __init__(self, options, endpoint):
        super().__init__(options.model_copy(update={"verify_checksums": False}), endpoint)


class HoardingSender(CheckpointSender):
    """Old versions are never removed."""

    def release(self, plan):
        pass


class SilentTimeout(CheckpointReceiver):
    """A timeout ends as if everything had arrived."""

    async def receive(self, plan, offers, loader):
        try:
            return await super().receive(plan, offers, loader)
        except Exception:
            await asyncio.sleep(0)
            return 0


# Runtimes


class SilentRestart(LocalRuntime):
    """A replica is rebuilt, and nothing says so."""

    def _tell(self, event):
        return None


class StaleRebuild(LocalRuntime):
    """A rebuilt replica serves the weights of the model directory."""

    async def sync_weights(self, trainer, generator, policy_version):
        receipts = await super().sync_weights(trainer, generator, policy_version)
        self.generator(generator).resync = None
        return receipts


class _ShuffledData(PlainData):
    def get(self, samples, fields=None):
        return super().get(samples[::-1], fields)


class ShuffledData(LocalRuntime):
    """Values come in another order than the samples that they were asked for."""

    def __init__(self, options, plan):
        super().__init__(options, plan)
        self.data = _ShuffledData()


class EndlessRestarts(LocalRuntime):
    """The limit of restarts is not kept."""

    def __init__(self, options, plan):
        super().__init__(options.model_copy(update={"max_generator_restarts": 5}), plan)


class ForgottenReplica(LocalRuntime):
    """One replica confirms what it never got."""

    async def sync_weights(self, trainer, generator, policy_version):
        fleet = self.generator(generator)
        others, fleet.replicas[1:] = fleet.replicas[1:], []
        [receipt] = await self._transfers[trainer, generator].sync([0], policy_version)
        fleet.replicas += others
        return [replace(receipt, replica=index) for index in range(fleet.num_replicas)]


class _ShortTrainer(LocalTrainer):
    async def derive(self, batch, function, split="group"):
        return await super().derive(batch.select(range(batch.num_sequences - 1)), function, split)


class LostSequence(LocalRuntime):
    """The last sequence of a batch gets lost on its way."""

    def trainer(self, role):
        made = super().trainer(role)
        return _ShortTrainer(made.name, made.trainer, made.executor)


class OtherRandomNumbers(LocalRuntime):
    """A request's seed is not the one that it was made with."""

    def generator(self, role):
        fleet = super().generator(role)
        if not hasattr(fleet, "unchanged"):
            fleet.unchanged = fleet.generate

            async def generate(request, replica=None):
                sampling = replace(request.sampling, seed=request.sampling.seed + 1)
                return await fleet.unchanged(replace(request, sampling=sampling), replica)

            fleet.generate = generate
        return fleet


class _MuteTrainer(LocalTrainer):
    async def update(self, batch, loss):
        try:
            return await super().update(batch, loss)
        except BackendTimeoutError:
            raise BackendTimeoutError("it took too long") from None


class NamelessTimeout(LocalRuntime):
    """A timeout without role, method and setting."""

    def trainer(self, role):
        made = super().trainer(role)
        return _MuteTrainer(made.name, made.trainer, made.executor)


class _LazyTrainer(LocalTrainer):
    async def _move(self, action, parts):
        return []


class UnmovedParts(LocalRuntime):
    """Parts that are to be moved stay where they are."""

    def trainer(self, role):
        made = super().trainer(role)
        return _LazyTrainer(made.name, made.trainer, made.executor)


class ClosedOnce(LocalRuntime):
    """The second ``close`` fails."""

    async def close(self):
        if getattr(self, "is_closed", False):
            raise RuntimeError("it was closed before")
        self.is_closed = True
        await super().close()


@dataclass(frozen=True)
class Mutant:
    """One broken backend and who notices."""

    kind: str
    base: str
    """Name of the first-party backend that is wrapped."""
    code: str
    """Class in this module; for a transport the one end that is broken."""
    caught_by: str
    """Contract test that must fail."""
    part: str = "factory"
    other: tuple[tuple[str, str], ...] = ()
    export: str | None = None
    """Of a transport: the form under test, if not its first."""

    @property
    def settings(self) -> dict[str, Any]:
        """What a subclass of the suite would set."""
        return {} if self.export is None else {"export": self.export}

    def record(self, base: PluginRecord) -> Any:
        """The base's record with the mutant's code, under a name of its own."""
        changes = {self.part: self.code, **dict(self.other)}
        strings = {part: f"{__name__}:{code}" for part, code in changes.items()}
        return dataclasses.replace(base, name=f"mutant_{self.code.lower()}", **strings)


def _of(kind: str, base: str, part: str = "factory", export: str | None = None, **caught_by: str) -> list[Mutant]:
    return [Mutant(kind, base, code, test, part, export=export) for code, test in caught_by.items()]


MUTANTS = [
    *_of(
        "trainer",
        "fsdp",
        ShiftedLogprobs="test_logprobs_equal_a_plain_forward",
        CrossingSequences="test_logprobs_equal_a_plain_forward",
        IgnoredTemperature="test_logprobs_equal_a_plain_forward",
        WrongOrder="test_outputs_do_not_depend_on_micro_batches",
        DroppedMask="test_masked_tokens_teach_nothing",
        ScaledByMicroBatches="test_update_does_not_depend_on_micro_batches",
        HiddenScale="test_update_reports_the_loss_and_gradient_norm_of_a_plain_forward",
        ClippedNorm="test_update_reports_the_loss_and_gradient_norm_of_a_plain_forward",
        SwallowedNonFinite="test_a_loss_that_is_not_finite_is_refused",
        Ascent="test_updates_descend",
        LostOptimizer="test_save_and_load_continue_bit_identically",
        StaleStream="test_stream_and_export_follow_updates",
        ReusedBuffer="test_streamed_tensors_outlive_the_step_of_the_stream",
        WrappedNames="test_manifest_has_the_names_of_the_model_directory",
        TrimmedManifest="test_manifest_describes_the_stream",
        StaleManifest="test_manifest_describes_the_stream",
        OwnedByNoRank="test_manifest_describes_the_stream",
        ShiftedBoxes="test_boxes_cover_every_tensor_once",
        MissingTail="test_boxes_cover_every_tensor_once",
        StaleBoxes="test_boxes_cover_every_tensor_once",
        OtherShare="test_weights_of_another_trainer_are_taken",
        OffloadInName="test_offloaded_parts_occupy_nothing",
    ),
    *_of(
        "generator",
        "transformers",
        StaleVersion="test_new_weights_change_the_output",
        WrongBasis="test_logprobs_are_of_the_stated_basis",
        UndeclaredBasis="test_logprobs_are_of_the_stated_basis",
        ShiftedGeneratorLogprobs="test_greedy_equals_a_plain_forward",
        IgnoredSeed="test_seeds_decide",
        SharedRandomness="test_seeds_decide",
        LostPartial="test_abort_returns_what_was_sampled",
        ForgottenPrior="test_resume_continues_an_aborted_completion",
        DeafPause="test_a_paused_request_goes_on_later",
        OpenDoor="test_what_comes_while_paused_waits",
        SampledInsteadOfScored="test_given_tokens_are_scored",
        ShiftedScores="test_given_tokens_are_scored",
        ScoresAtTemperatureOne="test_given_tokens_are_scored",
        ShiftedKeptIds="test_kept_ids_are_what_a_token_was_sampled_from",
        MostLikelyIds="test_kept_ids_are_what_a_token_was_sampled_from",
        StaleCache="test_an_unfinished_request_lives_through_a_sync_as_declared",
        AcceptedUnknownNames="test_weights_that_were_not_announced_are_refused",
        WrongName="test_new_weights_change_the_output",
        NeverLoaded="test_new_weights_change_the_output",
        MisplacedBoxes="test_new_weights_change_the_output",
        AcceptedGaps="test_boxes_that_do_not_cover_a_tensor_once_are_refused",
        KeptTensors="test_tensors_that_were_given_are_not_kept",
        NamelessErrors="test_errors_name_the_request",
        SleepInName="test_an_offloaded_generator_occupies_nothing",
    ),
    *_of(
        "reward",
        "function",
        WrongRewardOrder="test_one_result_a_sample_in_order",
        SwallowedRewardError="test_one_result_a_sample_in_order",
        RaisingReward="test_one_result_a_sample_in_order",
        SlowLeak="test_closing_leaves_no_process",
    ),
    Mutant(
        "weight_sync",
        "direct",
        "DroppedTensor",
        "test_every_tensor_arrives_bit_for_bit",
        "sender",
        (("receiver", "_UncheckedReceiver"),),
    ),
    *_of(
        "weight_sync",
        "direct",
        "sender",
        SwappedNames="test_every_tensor_arrives_bit_for_bit",
        RoundedTensors="test_every_tensor_arrives_bit_for_bit",
        StaleSender="test_several_syncs_in_a_row",
        SwallowedSenderError="test_a_failing_sender_reaches_the_receivers",
    ),
    *_of("weight_sync", "direct", "receiver", HangingReceiver="test_a_failing_loader_fails_its_replica_only"),
    *_of(
        "weight_sync",
        "checkpoint",
        "receiver",
        TrustedFiles="test_corrupted_files_are_refused",
        SilentTimeout="test_a_silent_sender_is_a_timeout_that_names_it",
    ),
    *_of("weight_sync", "checkpoint", "sender", HoardingSender="test_several_syncs_in_a_row"),
    *_of(
        "weight_sync",
        "shared_memory",
        "receiver",
        export="boxes",
        ShiftedArrival="test_several_ranks_and_replicas",
        TrimmedArrival="test_every_tensor_arrives_bit_for_bit",
        UncountedElements="test_boxes_that_leave_a_gap_are_refused",
        FirstManifest="test_each_sync_has_a_manifest_of_its_own",
    ),
    *_of("weight_sync", "shared_memory", "sender", export="boxes", MirroredRanks="test_several_ranks_and_replicas"),
    *_of(
        "runtime",
        "local",
        SilentRestart="test_a_dead_replica_is_reported_and_its_requests_start_again",
        StaleRebuild="test_a_dead_replica_is_reported_and_its_requests_start_again",
        EndlessRestarts="test_a_dead_replica_beyond_its_limit_is_refused",
        ForgottenReplica="test_weights_reach_every_replica",
        LostSequence="test_one_rank_gives_the_bits_of_the_local_runtime",
        ShuffledData="test_values_are_got_by_sample_and_field",
        OtherRandomNumbers="test_one_rank_gives_the_bits_of_the_local_runtime",
        NamelessTimeout="test_a_call_that_hangs_ends_by_its_timeout",
        UnmovedParts="test_parts_are_moved_out_and_back",
        ClosedOnce="test_close_twice_leaves_nothing",
    ),
]
"""Every kind has some; each wraps a first-party backend that passes its suite."""


def _in_order(batch: TrainBatch, values: torch.Tensor, order: list[int]) -> torch.Tensor:
    bounds = batch.cu_seqlens.tolist()
    return torch.cat([values[bounds[i] : bounds[i + 1]] for i in order])
