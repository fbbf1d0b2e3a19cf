"""Consumes rollouts: runs the flow's consumption stage over a step's samples, then makes the step's updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from chatlearn_core.batching import SamplePacker, mini_batches
from chatlearn_core.executor.advantages import AdvantageComputer
from chatlearn_core.executor.colocation import ColocationManager
from chatlearn_core.executor.device_sharing import DeviceUse
from chatlearn_core.executor.generator_mismatch import GeneratorMismatch
from chatlearn_core.executor.policy import POLICY_METRICS
from chatlearn_core.executor.rollouts.staleness import staleness_metrics
from chatlearn_core.executor.sample_metrics import sample_metrics
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.executor.step_samples import Experience, FinishedGroup
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Algorithm, Loss, RoleUpdate, Runtime
from chatlearn_core.protocols.data_store import fields_read_by
from chatlearn_core.runtime.boundary import check_update
from chatlearn_core.runtime.plan import RolePlan, origin_of
from chatlearn_core.types import Metric, Metrics, Sample, TrainBatch, merge_metrics
from chatlearn_core.types.keyed_seed import keyed_seed


class PolicyUpdater:
    """Completes the samples that a step trains on, and makes the updates that the algorithm plans, role by role.

    Every admitted sample is trained on once in each of an update's epochs. The order within an epoch depends on seed,
    step and epoch.

    Args:
        consumption: runs the flow's consumption stage (``stages``): calls on trainers, and calls that depend on them.
        advantages: computes and adds the advantages.
        mismatch: compares the policy's logprobs with the generator's; None if the flow computes none.
        serving: the generators that serve the policy's weights, for staleness; None: all.
        num_mini_batches: optimizer steps per pass, if the algorithm does not set them.
        epochs: passes over a step's samples, if the algorithm does not set them.
        colocation: leases devices for updates if roles share them; by default none do.
        roles: the planned roles; messages about their results name their plugins.
        policy: the role whose metrics are named ``policy/...``.
    """

    def __init__(
        self,
        runtime: Runtime,
        algorithm: Algorithm,
        *,
        consumption: FlowScheduler,
        advantages: AdvantageComputer,
        mismatch: GeneratorMismatch | None = None,
        serving: frozenset[str] | None = None,
        num_mini_batches: int,
        epochs: int,
        seed: int,
        colocation: ColocationManager | None = None,
        roles: Mapping[str, RolePlan] | None = None,
        policy: str | None = None,
    ) -> None:
        self.runtime = runtime
        self.algorithm = algorithm
        self.consumption = consumption
        self.advantages = advantages
        self.mismatch = mismatch
        self.serving = serving
        self.num_mini_batches = num_mini_batches
        self.epochs = epochs
        self.seed = seed
        self.colocation = colocation or ColocationManager(runtime)
        self.roles = roles or {}
        self.policy = policy

    async def prepare(
        self, step: int, groups: Sequence[FinishedGroup], policy_version: int, timers: Timers
    ) -> Experience:
        """Complete the groups of a step: run the consumption stage, then compute advantages.

        Args:
            groups: groups that the step trains on; data is added to their samples.
            policy_version: version of the policy's current weights.

        Raises:
            BackendError: a role failed.
            FlowError: the algorithm's data do not fit the samples.
        """
        requests = [request for group in groups for request in group.requests]
        packer = SamplePacker()
        samples = await self.consumption.run(requests, timers, packer=packer)
        with timers.measure("advantages"):
            metrics = await self.advantages.add(samples, step, packer)
        compared = {} if self.mismatch is None else await self.mismatch.metrics(samples, policy_version, packer)
        stale = staleness_metrics(samples, policy_version, self.serving)
        return Experience(step, samples, merge_metrics(metrics, sample_metrics(samples), stale, compared), packer)

    async def train(self, experience: Experience, timers: Timers) -> Metrics:
        """Make the step's updates; returns their merged metrics."""
        samples = experience.admitted
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        parts: list[Metrics] = [
            {
                "samples/trained": Metric(len(samples), reducer="sum"),
                "perf/trained_tokens": Metric(0, reducer="sum"),  # present even if no role is updated in this step
            }
        ]
        for update in self.algorithm.updates(experience.step):
            epochs = self.epochs if update.epochs is None else update.epochs
            parts.append({"perf/trained_tokens": Metric(epochs * num_tokens, reducer="sum")})
            batch = experience.packer.pack(samples, unit_index(samples, update.loss))
            batch = await self.runtime.data.aget_batch(batch, fields_read_by(update.loss))
            for epoch in range(epochs):
                parts += await self._epoch(batch, update, experience.step, epoch, timers)
        return merge_metrics(*parts)

    async def _epoch(
        self, batch: TrainBatch, update: RoleUpdate, step: int, epoch: int, timers: Timers
    ) -> list[Metrics]:
        """Make one pass over the batch; returns the metrics of its optimizer steps."""
        role, loss = update.role, update.loss
        count = self.num_mini_batches if update.mini_batches is None else update.mini_batches
        rng = np.random.Generator(np.random.Philox(keyed_seed(self.seed, "mini-batches", step, epoch)))
        divided = mini_batches(batch.unit_index.tolist(), count, generator=rng)
        parts: list[Metrics] = [{"training/updates": Metric(len(divided), reducer="sum")}]
        for indices in divided:
            mini_batch = loss.prepare(batch.select(indices))
            async with self.colocation.lease(DeviceUse(role, "update"), timers=timers):
                with timers.measure("update", role=role):
                    metrics = await self.runtime.trainer(role).update(mini_batch, loss)
            check_update(metrics, origin_of(self.roles, role, "trainer"))
            parts.append(_of_one_update(metrics, role, is_policy=role == self.policy))
        return parts


def unit_index(samples: Sequence[Sample], loss: Loss) -> list[int]:
    """[S] unit number of each sample; the loss needs the samples of a unit together."""
    units: dict[str, int] = {}
    names = (sample.unit_id if loss.unit == "sequence" else sample.group_id for sample in samples)
    return [units.setdefault(name, len(units)) for name in names]


def _of_one_update(metrics: Metrics, role: str, *, is_policy: bool) -> Metrics:
    """Convert one update's metrics to the step's names: ``policy/grad_norm``, ``critic/lr``. A loss, which is a sum
    over its mini-batch, is averaged over updates.

    Metrics of the policy that have a section of their own (``training/ranks_imbalance``) keep it. Those of other roles
    do not, so that they are never mistaken for the policy's; amounts add up over roles.
    """
    named: Metrics = {}
    for name, metric in metrics.items():
        is_amount = name.startswith(_AMOUNTS)
        if metric.reducer == "sum" and not is_amount:
            metric = Metric(metric.total, 1.0, "mean")
        if is_policy:
            name = name if "/" in name else f"{POLICY_METRICS}/{name}"
        elif not is_amount and not name.startswith(f"{role}/"):
            name = f"{role}/{name}"
        named[name] = metric
    return named


_AMOUNTS = ("timing_s/", "perf/")
"""Prefixes of metrics that are amounts: a step's value is the sum over its updates."""
