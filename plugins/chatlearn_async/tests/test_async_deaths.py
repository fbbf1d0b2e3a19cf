"""A replica that dies while updates change the trainer's weights: no token claims a version that did not sample it."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.observers import Observer, Observers
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_testing.fakes.generator import FakeGenerator
from chatlearn_testing.fakes.trainer import FakeTrainer

UPDATES = 3
"""A step."""


class Deaths:
    """When replica 0 dies, and what the replicas served."""

    def __init__(self) -> None:
        self.at_update: int | None = UPDATES + 1
        self.num_updates = 0
        self.replicas: list[DyingGenerator] = []
        self.rebuilt = threading.Event()
        self.at_sync: int | None = None
        """Replica 1 dies when replica 0 begins to load for the n-th time."""
        self.num_syncs = 0
        self.served: dict[int, set[str]] = defaultdict(set)
        """Version -> hashes of the weights that sampled under it."""


DEATHS = Deaths()


@pytest.fixture(autouse=True)
def deaths() -> Deaths:
    global DEATHS
    DEATHS = Deaths()
    return DEATHS


class DyingGenerator(FakeGenerator):
    def setup(self) -> None:
        super().setup()
        DEATHS.replicas.append(self)
        if DEATHS.num_updates and self.context.replica == 0:
            DEATHS.rebuilt.set()

    def stop_serving(self) -> None:
        super().stop_serving()
        if self.context.replica == 0:
            DEATHS.num_syncs += 1
            if DEATHS.num_syncs == DEATHS.at_sync:
                DEATHS.replicas[1].die("killed")

    def _append_token(self, run: Any, forced: int | None = None) -> int:
        tensors = (tensor.numpy().tobytes() for _, tensor in sorted(self._weights.items()))
        DEATHS.served[self._version].add(hashlib.sha256(b"".join(tensors)).hexdigest())
        return super()._append_token(run, forced)


class KillingTrainer(FakeTrainer):
    """Takes its time for an update, so that whoever asks for weights gets them between two updates."""

    def update(self, *arguments: Any) -> Any:
        metrics = super().update(*arguments)
        DEATHS.num_updates += 1
        if DEATHS.num_updates == DEATHS.at_update:
            DEATHS.replicas[0].die("killed")
            assert DEATHS.rebuilt.wait(20.0), "it had open requests"
        threading.Event().wait(0.03)
        return metrics


FACTORIES = {("fake", "generator"): "DyingGenerator", ("fake", "trainer"): "KillingTrainer"}


@pytest.fixture
def registry(registry: PluginRegistry) -> PluginRegistry:
    """With the replicas and the trainer of this file in the place of the fakes."""
    entries = []
    for entry in registry.entries:
        name = FACTORIES.get((entry.name, entry.kind))
        record = entry.record if name is None else replace(entry.record, factory=f"{__name__}:{name}")  # type: ignore[type-var]  # None has no factory
        entries.append(replace(entry, record=record))
    return replace(registry, entries=tuple(entries))


SLOW = "roles.generator.options.seconds_per_token=0.01"
RESULTS = ("model", "rollouts")
"""What does not depend on the number of restarts."""


@pytest.mark.parametrize(
    ("mode", "replicas", "transport"),
    [("one_step_off", 2, "auto"), ("one_step_off", 1, "checkpoint"), ("one_step_off", 1, "auto"), ("async", 2, "auto")],
)
async def test_weights_between_two_updates_are_never_served(
    mode: str, replicas: int, transport: str, runs: Any, deaths: Deaths
) -> None:
    """With another replica, or a transport that keeps each version, what is sampled is what an undisturbed run samples.
    A lone replica waits for the end of the updates, and samples under their version.
    """
    settings = [
        f"roles.generator.replicas={replicas}",
        f"weight_sync.backend={transport}",
        f"train.mini_batches={UPDATES}",
    ]
    settings += ["train.steps=3", "runtime.options.max_generator_restarts=1"]
    first: list[int] = []

    def keep(step: int, samples: Any) -> None:
        first.extend(span.version for sample in samples for span in sample.turns[0].version_spans if step == 3)

    run: Run = runs.make("killed", {"mode": mode}, SLOW, *settings)
    run.observers = Observers([Observer("chatlearn_rollout_end", "test 1", keep, ("step", "samples"))])
    assert (await run.train())["status"] == "completed"
    assert deaths.rebuilt.is_set()
    assert len(deaths.served) >= 2
    assert all(len(hashes) == 1 for hashes in deaths.served.values())
    found = runs.result("killed")
    assert found["totals"]["samples/trained"] == 3 * 3 * 2
    if mode == "one_step_off":
        lone = replicas == 1 and transport == "auto"
        assert set(first) == ({2} if lone else {1}), "of step 3: sampled while step 2 trained"
        deaths.at_update = None
        await runs.make("undisturbed", {"mode": mode}, *settings).train()
        undisturbed = runs.result("undisturbed")
        assert all((found[name] == undisturbed[name]) != lone for name in RESULTS)


async def test_a_replica_that_dies_while_another_loads_is_rebuilt_beside_the_sync(runs: Any, deaths: Deaths) -> None:
    """Its requests rebuild it during the sync, in which it has a turn of its own."""
    deaths.at_update, deaths.at_sync = None, 3
    rolling = ("weight_sync.fleet_rule=rolling", "train.steps=4", "runtime.options.max_generator_restarts=1")
    rollout = {"mode": "async", "options": {"during_sync": "continue"}}
    run: Run = runs.make("killed", rollout, SLOW, *rolling)
    assert (await run.train())["status"] == "completed"
    assert len(deaths.replicas) == 3
    assert len(deaths.served) >= 2
    assert all(len(hashes) == 1 for hashes in deaths.served.values())
    assert runs.result("killed")["totals"]["samples/trained"] == 4 * 3 * 2
