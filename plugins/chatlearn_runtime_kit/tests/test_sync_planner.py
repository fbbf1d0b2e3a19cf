"""What one sync carries: a delta only where every end holds what it builds on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from chatlearn_core.plugins.records import WeightSyncSpec
from chatlearn_core.runtime.plan import WeightRoute
from chatlearn_core.types import Endpoint, SyncReceipt, SyncRequest, TensorSpec, WeightManifest
from chatlearn_runtime_kit.sync_planner import SyncPlanner

MANIFEST = WeightManifest({"w": TensorSpec("w", (2, 3), "float32")})
SENDER = Endpoint("trainer", 0, 0, "host", "cpu", 1)
FIRST, SECOND = (Endpoint("generator", replica, 0, "host", "cpu", 2 + replica) for replica in range(2))


class Options(BaseModel):
    """None."""


def planner(tmp_path: Path, payloads: frozenset[Any] = frozenset({"full", "delta"}), **changes: Any) -> SyncPlanner:
    record = WeightSyncSpec(name="fake", sender="f:S", receiver="f:R", options="f:O", payloads=payloads)
    if "replayable" in changes:
        record = replace(record, replayable=changes.pop("replayable"))
    flow = WeightRoute("trainer", "generator", record, Options(), "test", "barrier", 1 << 20, 30.0)
    return SyncPlanner(replace(flow, **changes), tmp_path)


def finish(here: SyncPlanner, plan: SyncRequest, *states: str) -> None:
    """The sync came to its end; each receiver's state, ``serving`` by default."""
    here.sent(plan)
    for index, receiver in enumerate(plan.receivers):
        state: Any = states[index] if states else "serving"
        here.confirm(plan, receiver, SyncReceipt(receiver.replica, plan.policy_version, state))


def test_the_first_version_is_full_and_the_next_builds_on_it(tmp_path: Path) -> None:
    here = planner(tmp_path, channel="memory_handles")
    first = here.make(1, MANIFEST, [SENDER], [FIRST, SECOND])
    assert (first.payload, first.base_version, first.channel) == ("full", None, "memory_handles")
    assert Path(first.workspace) == tmp_path
    finish(here, first)
    second = here.make(2, MANIFEST, [SENDER], [FIRST, SECOND])
    assert (second.payload, second.base_version) == ("delta", 1)
    assert second.sync_id != first.sync_id


@pytest.mark.parametrize(
    "change",
    [
        {"receivers": [FIRST, replace(SECOND, process=9)]},
        {"receivers": [FIRST, replace(SECOND, incarnation=1)]},
        {"senders": [replace(SENDER, process=9)]},
        {"manifest": WeightManifest({"w": TensorSpec("w", (3, 3), "float32")})},
        {"policy_version": 1},
    ],
    ids=["another process", "rebuilt in its process", "another trainer", "another model", "the same version again"],
)
def test_whoever_does_not_hold_the_last_version_gets_all_of_the_next(tmp_path: Path, change: dict[str, Any]) -> None:
    here = planner(tmp_path)
    usual: dict[str, Any] = {"policy_version": 1, "manifest": MANIFEST, "senders": [SENDER]}
    finish(here, here.make(**usual, receivers=[FIRST, SECOND]))
    plan = here.make(**(usual | {"policy_version": 2, "receivers": [FIRST, SECOND]} | change))
    assert (plan.payload, plan.base_version) == ("full", None)


def test_a_replica_that_failed_holds_nothing(tmp_path: Path) -> None:
    here = planner(tmp_path)
    finish(here, here.make(1, MANIFEST, [SENDER], [FIRST, SECOND]), "serving", "dead")
    assert here.make(2, MANIFEST, [SENDER], [FIRST, SECOND]).payload == "full"
    assert here.make(2, MANIFEST, [SENDER], [FIRST]).payload == "delta"


def test_nothing_builds_on_a_version_that_was_not_sent(tmp_path: Path) -> None:
    here = planner(tmp_path)
    finish(here, here.make(1, MANIFEST, [SENDER], [FIRST]))
    here.make(2, MANIFEST, [SENDER], [FIRST])  # its sender failed
    assert here.make(3, MANIFEST, [SENDER], [FIRST]).base_version == 1


@pytest.mark.parametrize(
    ("payloads", "payload"), [(frozenset({"full"}), "full"), (frozenset({"full", "delta", "adapter"}), "adapter")]
)
def test_a_delta_needs_a_transport_for_it_and_whole_weights(
    tmp_path: Path, payloads: frozenset[Any], payload: Any
) -> None:
    here = planner(tmp_path, payloads, payload=payload)
    finish(here, here.make(1, MANIFEST, [SENDER], [FIRST]))
    assert here.make(2, MANIFEST, [SENDER], [FIRST]).payload == payload


def test_only_the_version_that_is_kept_can_be_replayed(tmp_path: Path) -> None:
    here = planner(tmp_path, replayable=True)
    assert here.replay(1, FIRST) is None
    plan = here.make(1, MANIFEST, [SENDER], [FIRST, SECOND])
    finish(here, plan)
    assert here.replay(1, SECOND) == replace(plan, receivers=(SECOND,))
    assert here.replay(2, SECOND) is None
    gone = planner(tmp_path, replayable=False)
    finish(gone, gone.make(1, MANIFEST, [SENDER], [FIRST]))
    assert gone.replay(1, FIRST) is None


def test_the_fleet_rule_says_who_changes_together(tmp_path: Path) -> None:
    assert planner(tmp_path).turns([0, 1, 2, 3, 4]) == [[0, 1, 2, 3, 4]]
    assert planner(tmp_path, fleet_rule="rolling").turns([0, 1, 2]) == [[0], [1], [2]]
    assert planner(tmp_path, fleet_rule="rolling", max_loading=2).turns([0, 1, 2, 3, 4]) == [[0, 1], [2, 3], [4]]
    assert planner(tmp_path).turns([]) == []
    assert planner(tmp_path, fleet_rule="rolling", replayable=True).sends_ahead
    assert not planner(tmp_path, fleet_rule="rolling").sends_ahead
