"""Roles that follow another one: when, in which order, and what is left behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chatlearn_core.executor.colocation import ColocationManager
from chatlearn_core.executor.refresh import RoleRefresher
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import ModelSource
from chatlearn_core.runtime.plan import Refresh, RolePlan

ROLES = {"policy": None, "reference": Refresh("policy", 2, 0.5), "old": Refresh("policy", 3, 0.0), "critic": None}


def role(name: str, refresh: Refresh | None) -> RolePlan:
    model = ModelSource(f"models/{name}", f"models/{name}")
    return RolePlan(name, "trainer", (), model, "lm", "cpu", 1, 1, refresh is None, {}, 60.0, refresh)


class Group:
    """Notes what is asked of it; ``export_model`` writes a file."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self.name, self.calls = name, calls

    async def export_model(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "weights").write_text(self.name)
        self.calls.append(("export", self.name))

    async def load_model(self, directory: Path, *, decay: float = 0.0) -> None:
        if self.name == "old" and self.fails:
            raise RuntimeError("another model")
        source = (directory / "weights").read_text() if directory.exists() else str(directory)
        self.calls.append(("load", self.name, source, decay))

    fails = False


@pytest.fixture
def made(tmp_path: Path) -> tuple[RoleRefresher, list[tuple[Any, ...]], dict[str, Group]]:
    calls: list[tuple[Any, ...]] = []
    groups = {name: Group(name, calls) for name in ROLES}
    runtime: Any = SimpleNamespace(trainer=lambda name: groups[name], devices=dict)
    roles = {name: role(name, refresh) for name, refresh in ROLES.items()}
    return RoleRefresher(runtime, roles, ColocationManager(runtime), tmp_path / "refresh"), calls, groups


async def test_each_role_follows_in_its_own_time_and_a_source_exports_once(made: Any, tmp_path: Path) -> None:
    refresher, calls, _ = made
    assert refresher.roles == ("reference", "old")
    found = [await refresher.refresh(step, Timers()) for step in range(1, 7)]
    reference, old = ("load", "reference", "policy", 0.5), ("load", "old", "policy", 0.0)
    export = ("export", "policy")
    assert calls == [export, reference, export, old, export, reference, export, reference, old]
    assert [metrics.get("training/refreshed_roles") is not None for metrics in found] == [
        False,
        *[True] * 3,
        False,
        True,
    ]
    assert not list((tmp_path / "refresh").iterdir()), "nothing is left on the disk"


async def test_what_a_killed_run_left_is_not_mixed_in(made: Any, tmp_path: Path) -> None:
    refresher, calls, groups = made
    (tmp_path / "refresh" / "policy").mkdir(parents=True)
    await refresher.refresh(2, Timers())
    assert calls[-1] == ("load", "reference", "policy", 0.5)
    groups["old"].fails = True
    with pytest.raises(RuntimeError, match="another model"):
        await refresher.refresh(3, Timers())
    assert not list((tmp_path / "refresh").iterdir()), "nothing is left after a failure"


async def test_going_back_to_the_beginning_undoes_what_was_learned_and_followed(made: Any) -> None:
    refresher, calls, _ = made
    await refresher.begin_anew(["policy", "critic"], Timers())
    assert calls == [("load", name, f"models/{name}", 0.0) for name in ("policy", "critic", "reference", "old")]
