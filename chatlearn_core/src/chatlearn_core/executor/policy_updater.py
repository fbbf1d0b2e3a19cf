"""Consumes rollouts: runs the flow's consumption stage over those of a step, and makes the step's updates from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from chatlearn_core.batching import mini_batches
from chatlearn_core.executor.advantages import AdvantageComputer
from chatlearn_core.executor.colocation import ColocationManager
from chatlearn_core.executor.device_sharing import DeviceUse
from chatlearn_core.executor.experience import Experience, sample_metrics
from chatlearn_core.executor.finished_group import FinishedGroup
from chatlearn_core.executor.generator_mismatch import GeneratorMismatch
from chatlearn_core.executor.policy import POLICY_METRICS
from chatlearn_core.executor.rollouts.staleness import staleness_metrics
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Algorithm, Loss, RoleUpdate, Runtime
from chatlearn_core.protocols.data_store import fields_read_by
from chatlearn_core.runtime.boundary import check_update
from chatlearn_core.runtime.plan import RolePlan, origin_of
from chatlearn_core.types import Metric, Metrics, Sample, TrainBatch, merge_metrics, pack_samples
from chatlearn_core.types.keyed_seed import keyed_seed


class PolicyUpdater:
    """Completes what a step trains on, and makes the updates that the algorithm plans for it, role by role.

    Every admitted sample is trained on once in each of an update's epochs. The order within an epoch is drawn from the
    seed, step and epoch.

    Args:
        consumption: runs the flow's consumption stage (``stages``): calls on trainers, and what depends on them.
        advantages: adds them.
        mismatch: compares the policy's logprobs with the generator's; None where the flow computes none.
        serving: the generators that serve the policy's weights, for staleness; None: all.
        num_mini_batches: optimizer steps a pass, where the algorithm does not say.
        epochs: passes over a step's samples, where the algorithm does not say.
        colocation: gives updates a lease where roles share devices; by default none do.
        roles: as planned; messages about what they return are led by their plugins.
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
            groups: that the step trains on; data is added to their samples.
            policy_version: of the weights that the policy has now.

        Raises:
            BackendError: a role failed.
            FlowError: what the algorithm computes does not fit the samples.
        """
        requests = [request for group in groups for request in group.requests]
        samples = await self.consumption.run(requests, timers)
        with timers.measure("advantages"):
            metrics = await self.advantages.add(samples, step)
        compared = {} if self.mismatch is None else await self.mismatch.metrics(samples, policy_version)
        stale = staleness_metrics(samples, policy_version, self.serving)
        return Experience(step, samples, merge_metrics(metrics, sample_metrics(samples), stale, compared))

    async def train(self, experience: Experience, timers: Timers) -> Metrics:
        """Make the step's updates; returns their merged metrics."""
        samples = experience.admitted
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        parts: list[Metrics] = [
            {
                "samples/trained": Metric(len(samples), reducer="sum"),
                "perf/trained_tokens": Metric(0, reducer="sum"),  # also of a step in which every role rests
            }
        ]
        for update in self.algorithm.updates(experience.step):
            epochs = self.epochs if update.epochs is None else update.epochs
            parts.append({"perf/trained_tokens": Metric(epochs * num_tokens, reducer="sum")})
            units = unit_index(samples, update.loss)
            prepared = await self.runtime.data.aget(samples, fields_read_by(update.loss))
            for epoch in range(epochs):
                parts += await self._epoch(prepared, units, update, experience.step, epoch, timers)
        return merge_metrics(*parts)

    async def _epoch(
        self,
        samples: Sequence[Sample],
        units: Sequence[int],
        update: RoleUpdate,
        step: int,
        epoch: int,
        timers: Timers,
    ) -> list[Metrics]:
        """One pass over the samples; the metrics of its optimizer steps."""
        role, loss = update.role, update.loss
        count = self.num_mini_batches if update.mini_batches is None else update.mini_batches
        rng = np.random.Generator(np.random.Philox(keyed_seed(self.seed, "mini-batches", step, epoch)))
        divided = mini_batches(units, count, generator=rng)
        parts: list[Metrics] = [{"training/updates": Metric(len(divided), reducer="sum")}]
        for indices in divided:
            batch = loss.prepare(_batch(samples, units, indices))
            async with self.colocation.lease(DeviceUse(role, "update"), timers=timers):
                with timers.measure("update", role=role):
                    metrics = await self.runtime.trainer(role).update(batch, loss)
            check_update(metrics, origin_of(self.roles, role, "trainer"))
            parts.append(_of_one_update(metrics, role, is_policy=role == self.policy))
        return parts


def unit_index(samples: Sequence[Sample], loss: Loss) -> list[int]:
    """Which samples the loss needs together: one number a unit."""
    units: dict[str, int] = {}
    names = (sample.unit_id if loss.unit == "sequence" else sample.group_id for sample in samples)
    return [units.setdefault(name, len(units)) for name in names]


def _of_one_update(metrics: Metrics, role: str, *, is_policy: bool) -> Metrics:
    """One update's metrics as a part of the step's: named ``policy/grad_norm``, ``critic/lr``, and a loss, which is a
    sum over its mini-batch, averaged over updates.

    The policy's that have a section of their own (``training/ranks_imbalance``) keep it. Another role's do not, so that
    they are never taken for the policy's; amounts add up over roles.
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
"""Metrics of an update that are amounts: a step's is the sum over its updates."""


def _batch(samples: Sequence[Sample], units: Sequence[int], indices: Sequence[int]) -> TrainBatch:
    return pack_samples([samples[i] for i in indices], [units[i] for i in indices])
