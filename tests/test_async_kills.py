"""An asynchronous run killed with SIGKILL goes on with what was in flight: nothing is lost or trained on twice."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODES: dict[str, dict[str, Any]] = {
    "one_step_off": {"mode": "one_step_off"},
    "async": {"mode": "async", "max_staleness": 2},
}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """Results by mode, computed once."""
    return {}


def trained(run_dir: Path) -> dict[str, list[str]]:
    """The ids of the samples that each step took, in order."""
    files = sorted((run_dir / "rollouts").glob("step_*"))
    return {file.name: [json.loads(line)["id"] for line in file.read_text().splitlines()] for file in files}


@pytest.mark.parametrize(
    ("mode", "moment"),
    [
        ("one_step_off", "update:10"),  # between two updates of step 3
        ("async", "completion:30"),
        ("async", "synced:3"),  # the generators hold step 2's weights, and go on; its line is not written
        ("async", "half a save:2"),
    ],
)
def test_killed_at_a_defined_moment(
    mode: str, moment: str, recipe: Any, chatlearn: Any, result_of: Any, undisturbed: dict[str, Any]
) -> None:
    recipe.content["rollout"] = MODES[mode]
    recipe.content["algorithm"]["options"]["importance_correction"] = "truncate"
    recipe.write()
    if mode not in undisturbed:
        apart = recipe.run_dir.with_name("undisturbed")
        finished = chatlearn("run", recipe.file, f"output_dir={apart}")
        assert finished.code == 0, finished.output
        undisturbed[mode] = result_of(apart), trained(apart)
    expected, taken = undisturbed[mode]
    killed = chatlearn("run", recipe.file, PROBE=moment)
    assert killed.code == -signal.SIGKILL, killed.output
    resumed = chatlearn("run", recipe.file)
    assert resumed.code == 0, resumed.output
    assert trained(recipe.run_dir) == taken
    found = result_of(recipe.run_dir)
    assert all(line["training/updates"] == 4 for line in found.metrics), "2 mini-batches x 2 epochs"
    assert all(line["rollout/dropped_stale"] == 0 for line in found.metrics)
    for name in ("samples/admitted", "samples/total", "samples/trained", "samples/excluded"):
        assert found.totals[name] == expected.totals[name]
    if mode == "one_step_off":  # it does not depend on timing
        assert found.model == expected.model
        assert found.rollouts == expected.rollouts


@pytest.mark.thorough
@pytest.mark.parametrize("moment", [None, "completion:40", "synced:3"])
def test_the_record_of_a_run_repeats_it_bit_for_bit(
    moment: str | None, recipe: Any, chatlearn: Any, result_of: Any
) -> None:
    """With a real trainer and generator, also if the recorded run was killed and went on."""
    recipe.content["rollout"] = {**MODES["async"], "options": {"during_sync": "abort"}}
    recipe.content["algorithm"]["options"]["importance_correction"] = "truncate"
    recipe.content["sampling"]["max_tokens"] = 120  # longer than an update
    recipe.write()
    if moment is not None:
        assert chatlearn("run", recipe.file, PROBE=moment).code == -signal.SIGKILL
    recorded = chatlearn("run", recipe.file)
    assert recorded.code == 0, recorded.output
    apart = recipe.run_dir.with_name("again")
    replay = f"rollout.options.replay={recipe.run_dir / 'admissions.jsonl'}"
    again = chatlearn("run", recipe.file, f"output_dir={apart}", replay)
    assert again.code == 0, again.output
    assert ends(apart) == ends(recipe.run_dir)
    assert any(len(versions) > 1 for versions in ends(apart).values()), "a weight sync within a completion"
    expected, found = result_of(recipe.run_dir), result_of(apart)
    assert found.rollouts == expected.rollouts
    assert found.model == expected.model
    assert found.totals == expected.totals


def ends(run_dir: Path) -> dict[str, list[list[int]]]:
    """Request -> (version, stop) of its tokens; of one that was made again, the last record counts."""
    lines = [json.loads(line) for line in (run_dir / "admissions.jsonl").read_text().splitlines()]
    return {line["request"]: line["ends"] for line in lines if "request" in line}
