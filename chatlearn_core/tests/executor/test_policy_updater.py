"""Training: every admitted sample exactly as often as planned, in an order that depends on seed, step and epoch."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_core.exceptions import BackendError
from chatlearn_core.executor.policy_updater import PolicyUpdater, unit_index
from chatlearn_core.executor.step_samples import Experience
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Loss, PlainData, RoleUpdate
from chatlearn_core.types import Metric, Metrics, OutputRequest, Prompt, Sample, TrainBatch


@dataclass
class FakeLoss:
    """Marks the batches it prepared."""

    unit: Any = "sequence"
    needs: OutputRequest = OutputRequest(frozenset({"logprobs"}))  # noqa: RUF009  # frozen itself

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        batch.sequence_data["prepared"] = batch.unit_index
        return batch


class FakeRuntime:
    """Notes every update."""

    def __init__(self, metrics: Metrics | None = None, fail_at: int | None = None) -> None:
        self.data = PlainData()
        self.updates: list[tuple[str, TrainBatch]] = []
        self.metrics = {"loss": Metric(0.0, reducer="sum")} | (metrics or {})
        self.fail_at = fail_at

    def trainer(self, role: str) -> Any:
        runtime = self

        class Group:
            async def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
                assert "prepared" in batch.sequence_data, "statistics come from the whole mini-batch"
                if len(runtime.updates) == runtime.fail_at:
                    raise BackendError("the gradient norm is nan")
                runtime.updates.append((role, batch))
                return dict(runtime.metrics)

        return Group()


def make_experience(
    num: int, *, group_size: int = 2, excluded: frozenset[int] = frozenset(), step: int = 1
) -> Experience:
    samples = []
    for i in range(num):
        ids = np.arange(2 + i % 3)
        group = f"g{i // group_size}"
        sample = Sample(f"s{i}", group, Prompt(group, ids[:1], "?"), ids, np.arange(len(ids)) > 0)
        sample.exclusion = "failed" if i in excluded else None
        samples.append(sample)
    return Experience(step, samples, {})


def trainer_of(
    runtime: FakeRuntime,
    losses: Any = None,
    *,
    mini: int = 1,
    epochs: int = 1,
    seed: int = 0,
    policy: str = "trainer",
) -> Any:
    class Algorithm:
        def updates(self, step: int) -> list[RoleUpdate]:
            return [RoleUpdate(role, loss) for role, loss in (losses or {"trainer": FakeLoss()}).items()]

    return PolicyUpdater(
        runtime,  # type: ignore[arg-type]  # the part that is used
        Algorithm(),  # type: ignore[arg-type]  # as above
        consumption=None,  # type: ignore[arg-type]  # of ``prepare``, tested apart
        advantages=None,  # type: ignore[arg-type]  # as above
        num_mini_batches=mini,
        epochs=epochs,
        seed=seed,
        policy=policy,
    )


@settings(deadline=None)
@given(
    num=st.integers(0, 12),
    excluded=st.frozensets(st.integers(0, 11)),
    mini=st.integers(1, 5),
    epochs=st.integers(1, 3),
    unit=st.sampled_from(["sequence", "group"]),
)
def test_every_admitted_sample_is_trained_exactly_epochs_times(
    num: int, excluded: frozenset[int], mini: int, epochs: int, unit: str
) -> None:
    runtime, experience = FakeRuntime(), make_experience(num, excluded=excluded)
    trainer = trainer_of(runtime, {"trainer": FakeLoss(unit)}, mini=mini, epochs=epochs)
    metrics = asyncio.run(trainer.train(experience, Timers()))
    seen = Counter(sample_id for _, batch in runtime.updates for sample_id in batch.sample_ids)
    assert seen == {sample.id: epochs for sample in experience.admitted}
    assert metrics["samples/trained"].value == len(experience.admitted)
    assert metrics["perf/trained_tokens"].value == epochs * sum(len(s.token_ids) for s in experience.admitted)
    num_units = len({s.group_id for s in experience.admitted}) if unit == "group" else len(experience.admitted)
    assert len(runtime.updates) == epochs * min(mini, num_units)
    assert metrics["training/updates"].value == len(runtime.updates)
    if unit == "group":
        for epoch in range(epochs):
            batches = runtime.updates[epoch * min(mini, num_units) : (epoch + 1) * min(mini, num_units)]
            homes = [{int(s[1:]) // 2 for s in batch.sample_ids} for _, batch in batches]
            assert len(set().union(*homes)) == sum(map(len, homes)), "no group is torn apart" if homes else ""


def orders(seed: int, step: int) -> list[tuple[str, ...]]:
    runtime = FakeRuntime()
    asyncio.run(trainer_of(runtime, mini=2, epochs=2, seed=seed).train(make_experience(12, step=step), Timers()))
    return [batch.sample_ids for _, batch in runtime.updates]


def test_the_order_is_drawn_from_seed_step_and_epoch() -> None:
    assert orders(0, 1) == orders(0, 1)
    different = [orders(0, 1)[:2], orders(0, 1)[2:], orders(0, 2)[:2], orders(1, 1)[:2]]
    assert len({str(order) for order in different}) == 4


def test_every_role_with_a_loss_learns() -> None:
    runtime = FakeRuntime({"loss": Metric(2.0, reducer="sum"), "grad_norm": Metric(1.0), "kl": Metric(1.0, 4)})
    trainer = trainer_of(runtime, {"trainer": FakeLoss(), "critic": FakeLoss()}, mini=2)
    metrics = asyncio.run(trainer.train(make_experience(4), Timers()))
    assert [role for role, _ in runtime.updates] == ["trainer", "trainer", "critic", "critic"]
    assert metrics["policy/loss"].value == 2.0, "a loss is a sum over its mini-batch: averaged over updates"
    assert metrics["critic/grad_norm"].value == 1.0
    assert metrics["policy/kl"].value == 0.25
    assert metrics["critic/kl"].value == 0.25, "what another role reports is never taken for the policy's"


def test_the_policys_metrics_have_the_fields_names_whatever_it_is_called() -> None:
    """It is the second that learns here, and still the one whose metrics keep their names."""
    losses = {"helper": FakeLoss(), "policy": FakeLoss()}
    runtime = FakeRuntime({"loss": Metric(2.0, reducer="sum"), "policy/ppo_kl": Metric(1.0, 4), "lr": Metric(0.1)})
    runtime.metrics["helper/already"] = Metric(1.0)
    metrics = asyncio.run(trainer_of(runtime, losses, policy="policy").train(make_experience(4), Timers()))
    assert [role for role, _ in runtime.updates] == ["helper", "policy"], "in the algorithm's order"
    assert metrics["helper/already"].value == 1.0, "a name that begins with the role stays"
    named = {name for name in metrics if not name.startswith(("samples/", "perf/", "training/"))}
    assert named == {
        "policy/loss",
        "policy/lr",
        "policy/ppo_kl",
        "helper/loss",
        "helper/lr",
        "helper/policy/ppo_kl",
        "helper/already",
    }


def test_amounts_are_added_up_over_updates() -> None:
    runtime = FakeRuntime({"timing_s/forward": Metric(1.5, reducer="sum"), "perf/tokens": Metric(10, reducer="sum")})
    metrics = asyncio.run(trainer_of(runtime, mini=3).train(make_experience(6), Timers()))
    assert metrics["timing_s/forward"].value == 4.5
    assert metrics["perf/tokens"].value == 30


def test_a_failing_update_is_raised_and_ends_the_step() -> None:
    runtime = FakeRuntime(fail_at=1)
    with pytest.raises(BackendError, match="the gradient norm is nan"):
        asyncio.run(trainer_of(runtime, mini=4).train(make_experience(8), Timers()))
    assert len(runtime.updates) == 1


def test_units_are_sequences_or_groups() -> None:
    samples = make_experience(6, group_size=3).samples
    assert unit_index(samples, FakeLoss("sequence")) == [0, 1, 2, 3, 4, 5]  # type: ignore[arg-type]  # as far as it is used
    assert unit_index(samples, FakeLoss("group")) == [0, 0, 0, 1, 1, 1]  # type: ignore[arg-type]  # as far as it is used
