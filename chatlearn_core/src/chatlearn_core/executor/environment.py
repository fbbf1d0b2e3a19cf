"""The environment makes experience: it draws prompts, runs the flow, and hands over scored samples."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.rollouts.partial import PartialRollouts
from chatlearn_core.executor.rollouts.pending import Group
from chatlearn_core.executor.rollouts.staleness import fresh_mask, newest_version, staleness_metrics
from chatlearn_core.executor.scheduler import FlowScheduler, Slot
from chatlearn_core.executor.seeds import keyed_seed
from chatlearn_core.losses.mismatch import mismatch_metrics
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Algorithm
from chatlearn_core.types import (
    RAW_BASIS,
    UNGRADED,
    Demonstration,
    Example,
    Floats,
    GenerateRequest,
    LogprobBasis,
    Metric,
    Metrics,
    Prompt,
    Sample,
    SamplingParams,
    TrainBatch,
    joined,
    merge_metrics,
    pack_samples,
)


@dataclass(slots=True)
class Experience:
    """The samples of one step. Those with an ``exclusion`` are not trained on, but counted."""

    step: int
    samples: list[Sample]
    metrics: Metrics
    pending: tuple[Group, ...] = ()
    """Rollouts that go on in the next step."""

    @property
    def admitted(self) -> list[Sample]:
        """What is trained on."""
        return [sample for sample in self.samples if sample.exclusion is None]


class Environment:
    """Turns examples into experience by running the algorithm's flow.

    Args:
        scheduler: runs the flow's graph.
        algorithm: says how many completions a prompt gets and computes advantages.
        sampling: how completions are sampled; its seed is replaced for every sample.
        seed: the run's seed.
        rollouts: what the scheduler has in front of the generators, for its metrics.
        partial: makes rollouts that may last longer than a step.
        policy: the role whose logprobs are compared with the generator's.
    """

    def __init__(
        self,
        scheduler: FlowScheduler,
        algorithm: Algorithm,
        sampling: SamplingParams,
        seed: int,
        *,
        rollouts: Rollouts | None = None,
        partial: PartialRollouts | None = None,
        policy: str | None = None,
    ) -> None:
        self.policy = policy
        self.scheduler = scheduler
        self.algorithm = algorithm
        self.sampling = sampling
        self.seed = seed
        self.rollouts = rollouts
        self.partial = partial

    def num_prompts(self, prompts_per_step: int, pending: Sequence[Group]) -> int:
        """How many examples the next step takes."""
        return prompts_per_step if self.partial is None else self.partial.num_prompts(pending)

    def slots_of(self, prompt: Prompt, step: int) -> list[Slot]:
        """The samples of a prompt that was drawn in a step."""
        return make_slots([prompt], step, self.algorithm.group_size, self.sampling, self.seed)

    async def make(
        self, step: int, examples: Sequence[Example], timers: Timers, pending: Sequence[Group] = ()
    ) -> Experience:
        """Run one step's flow over ``examples``, and over the rollouts that were ``pending`` before it."""
        slots = make_slots(examples, step, self.algorithm.group_size, self.sampling, self.seed)
        samples, left, rolled = await self._run(slots, step, timers, pending)
        with timers.measure("advantages"):
            metrics = self.algorithm.prepare_samples(samples)
        return Experience(
            step,
            samples,
            merge_metrics(
                metrics, rolled, sample_metrics(samples), staleness_metrics(samples), await self._mismatch(samples)
            ),
            left,
        )

    async def _run(
        self, slots: list[Slot], step: int, timers: Timers, pending: Sequence[Group]
    ) -> tuple[list[Sample], tuple[Group, ...], Metrics]:
        """Samples of the step, what is pending after it, and metrics of the generation."""
        left: tuple[Group, ...] = ()
        metrics: Metrics = {}
        if self.partial is None:
            samples = await self.scheduler.run(slots, timers)
        else:
            turn = self.partial.begin(pending, slots, step)
            playing = asyncio.create_task(self.partial.play(turn))
            try:
                samples = await self.scheduler.run(turn.slots, timers, turn)
            finally:
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)  # its errors have reached the scheduler
            left, metrics = self.partial.finish(turn)
        return samples, left, metrics | (self.rollouts.metrics() if self.rollouts is not None else {})

    async def weights_changed(self) -> None:
        """Every generator serves new weights: what waited for them goes on."""
        if self.partial is not None:
            await self.partial.weights_changed()

    async def close(self) -> None:
        """Give up rollouts that go on between steps."""
        if self.partial is not None:
            await self.partial.close()

    async def _mismatch(self, samples: Sequence[Sample]) -> Metrics:
        """Measured by the trainer that computed the logprobs: its workers have the arrays, or fetch them."""
        nodes = self.scheduler.graph.nodes
        node = next((node for node in nodes if node.role == self.policy and node.method.name == "logprobs"), None)
        if node is None:
            return {}
        batch = both_logprobs(samples, self.sampling, node.field)
        if not batch.num_sequences:
            return {}
        return await self.scheduler.runtime.trainer(node.role).measure(batch, generator_mismatch)


def make_slots(
    examples: Sequence[Example], step: int | str, group_size: int, sampling: SamplingParams, seed: int
) -> list[Slot]:
    """One slot a sample, group by group. A sample's random numbers depend on (seed, prompt, step, index) alone."""
    slots: list[Slot] = []
    for example in examples:
        if isinstance(example, Demonstration):
            slots.append(_demonstration_slot(example, step))
            continue
        group_id = f"{example.id}@{step}"
        for index in range(group_size):
            sample_id = f"{group_id}#{index}"
            own = replace(sampling, seed=keyed_seed(seed, "sample", sample_id))
            request = GenerateRequest(sample_id, example.token_ids, own, group_id)
            slots.append(Slot(sample_id, group_id, example, request))
    return slots


def _demonstration_slot(example: Demonstration, step: int | str) -> Slot:
    prompt = example.prompt
    token_ids = np.concatenate([prompt.token_ids, example.completion_ids]).astype(np.int64)
    loss_mask = np.arange(len(token_ids)) >= len(prompt.token_ids)
    if example.loss_mask is not None:
        loss_mask[len(prompt.token_ids) :] = example.loss_mask
    group_id = f"{prompt.id}@{step}"
    sample = Sample(f"{group_id}#0", group_id, prompt, token_ids, loss_mask)
    return Slot(sample.id, group_id, prompt, None, sample)


def sample_metrics(samples: Sequence[Sample]) -> Metrics:
    """Lengths and what happened to the samples."""
    metrics: Metrics = {
        "samples/total": Metric(len(samples), reducer="sum"),
        "samples/excluded": Metric(sum(s.exclusion is not None for s in samples), reducer="sum"),
        "prompt_length/mean": Metric(sum(s.num_prompt_tokens for s in samples), len(samples)),
    }
    for reason, count in Counter(s.exclusion.split(":")[0] for s in samples if s.exclusion).items():
        metrics[f"samples/excluded/{reason.replace(' ', '_')}"] = Metric(count, reducer="sum")
    if ungraded := sum(s.reward is not None and UNGRADED in s.reward.components for s in samples):
        metrics["samples/ungraded"] = Metric(ungraded, reducer="sum")
    lengths = [s.num_completion_tokens for s in samples if s.loss_mask.any()]
    if lengths:
        metrics["response_length/mean"] = Metric(sum(lengths), len(lengths))
        metrics["response_length/max"] = Metric(max(lengths), reducer="max")
        metrics["response_length/min"] = Metric(min(lengths), reducer="min")
    finished = [s.completion for s in samples if s.completion is not None]
    if finished:
        clipped = sum(completion.finish_reason == "length" for completion in finished)
        metrics["response_length/clip_ratio"] = Metric(clipped, len(finished))
    return metrics


def both_logprobs(samples: Sequence[Sample], sampling: SamplingParams, trained: str) -> TrainBatch:
    """The samples that have the logprobs of policy and generator, and both of one distribution, in ``token_data`` as
    ``trainer_logprobs`` and ``generator_logprobs``.

    The trainer divides its logits by the sampling temperature and cuts nothing off. Tokens that older weights sampled
    are masked out: there the two differ for a good reason.
    """
    basis = LogprobBasis(sampling.temperature or 1.0)
    version = newest_version(samples)
    both: list[Sample] = []
    for sample in samples:
        logprobs = _generator_logprobs(sample, basis)
        if logprobs is not None and trained in sample.token_data:
            arrays = {"trainer_logprobs": sample.token_data[trained], "generator_logprobs": logprobs}
            mask = fresh_mask(sample, version)
            both.append(replace(sample, loss_mask=mask, token_data=arrays, sequence_data={}))
    return pack_samples(both)


def generator_mismatch(batch: TrainBatch) -> Metrics:
    """How far the generator's logprobs are from the trainer's in what ``both_logprobs`` returns."""
    data = batch.token_data
    return mismatch_metrics(data["trainer_logprobs"], data["generator_logprobs"], batch.loss_mask)


def _generator_logprobs(sample: Sample, basis: LogprobBasis) -> Floats | None:
    """[T] the generator's logprobs of that basis, zero on the prompt; None if it gave none."""
    completion = sample.completion
    if completion is None:
        return None
    if completion.basis == basis:
        return sample.token_data.get("generator_logprobs", sample.token_data.get("generator_raw_logprobs"))
    if basis == RAW_BASIS and completion.raw_logprobs is not None:
        return joined([np.zeros(sample.num_prompt_tokens, np.float32), completion.raw_logprobs])
    return None
