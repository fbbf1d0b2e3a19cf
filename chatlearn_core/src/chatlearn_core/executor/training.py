"""Consumes experience: splits a step's samples into mini-batches and makes one optimizer update from each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from chatlearn_core.batching import mini_batches
from chatlearn_core.executor.environment import Experience
from chatlearn_core.executor.memory import MemoryTurns
from chatlearn_core.executor.policy import POLICY_METRICS
from chatlearn_core.executor.seeds import keyed_seed
from chatlearn_core.executor.sharing import Use
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Algorithm, Loss, Runtime
from chatlearn_core.runtime.boundary import check_update
from chatlearn_core.runtime.plan import RolePlan, origin_of
from chatlearn_core.types import Metric, Metrics, Sample, TrainBatch, merge_metrics, pack_samples


class ExperienceTrainer:
    """Trains every role that has a loss, ``epochs`` times over a step's samples in ``num_mini_batches`` updates each.

    Every admitted sample is trained on exactly ``epochs`` times. The order within an epoch is drawn from the seed,
    step and epoch.

    Args:
        memory: gives updates their turn where roles share devices; by default none do.
        roles: as planned; messages about what they return are led by their plugins.
        policy: the role whose metrics are named ``actor/...``.
    """

    def __init__(
        self,
        runtime: Runtime,
        algorithm: Algorithm,
        *,
        num_mini_batches: int,
        epochs: int,
        seed: int,
        memory: MemoryTurns | None = None,
        roles: Mapping[str, RolePlan] | None = None,
        policy: str | None = None,
    ) -> None:
        self.runtime = runtime
        self.losses = dict(algorithm.losses())
        self.num_mini_batches = num_mini_batches
        self.epochs = epochs
        self.seed = seed
        self.memory = memory or MemoryTurns(runtime)
        self.roles = roles or {}
        self.policy = policy

    async def train(self, experience: Experience, timers: Timers) -> Metrics:
        """Make the step's updates; returns their merged metrics."""
        samples = experience.admitted
        parts: list[Metrics] = [
            {
                "samples/trained": Metric(len(samples), reducer="sum"),
                "perf/trained_tokens": Metric(self.epochs * sum(len(s.token_ids) for s in samples), reducer="sum"),
            }
        ]
        for role, loss in self.losses.items():
            units = unit_index(samples, loss)
            for epoch in range(self.epochs):
                divided = self._mini_batches(samples, units, experience.step, epoch)
                parts.append({"training/updates": Metric(len(divided), reducer="sum")})
                for indices in divided:
                    batch = loss.prepare(_batch(samples, units, indices))
                    async with self.memory.turn(Use(role, "update"), timers=timers):
                        with timers.measure("update", role=role):
                            metrics = await self.runtime.trainer(role).update(batch, loss)
                    check_update(metrics, origin_of(self.roles, role, "trainer"))
                    parts.append(_of_one_update(metrics, role, is_policy=role == self.policy))
        return merge_metrics(*parts)

    def _mini_batches(self, samples: Sequence[Sample], units: Sequence[int], step: int, epoch: int) -> list[list[int]]:
        rng = np.random.Generator(np.random.Philox(keyed_seed(self.seed, "mini-batches", step, epoch)))
        return mini_batches(units, self.num_mini_batches, generator=rng)


def unit_index(samples: Sequence[Sample], loss: Loss) -> list[int]:
    """Which samples the loss needs together: one number a unit."""
    if loss.unit == "sequence":
        return list(range(len(samples)))
    groups: dict[str, int] = {}
    return [groups.setdefault(sample.group_id, len(groups)) for sample in samples]


def _of_one_update(metrics: Metrics, role: str, *, is_policy: bool) -> Metrics:
    """One update's metrics as a part of the step's, and a loss, which is a sum over its mini-batch, averaged over
    updates. The policy's have the names the field uses (``actor/grad_norm``, and what its loss calls its own); those of
    another role begin with the role (``critic/lr``), so that they are never taken for the policy's.
    """
    named: Metrics = {}
    for name, metric in metrics.items():
        adds_up = name.startswith(_ADDED_UP)
        if metric.reducer == "sum" and not adds_up:
            metric = Metric(metric.total, 1.0, "mean")
        if is_policy:
            name = f"{POLICY_METRICS}/{name}" if name in _OWN else name
        elif not adds_up and not name.startswith(f"{role}/"):
            name = f"{role}/{name}"
        named[name] = metric
    return named


_OWN = frozenset({"loss", "grad_norm", "lr"})
_ADDED_UP = ("timing_s/", "perf/")
"""Metrics of an update that are amounts: a step's is the sum over its updates."""


def _batch(samples: Sequence[Sample], units: Sequence[int], indices: Sequence[int]) -> TrainBatch:
    chosen = [samples[i] for i in indices]
    return pack_samples(chosen, {samples[i].id: units[i] for i in indices})
