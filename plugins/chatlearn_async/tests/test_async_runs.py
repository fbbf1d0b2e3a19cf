"""Whole asynchronous runs: ``sync`` where nothing may be stale, within the bound, repeatable, whole after a stop."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chatlearn_async import timeline
from chatlearn_async.admissions import FILE
from chatlearn_core.exceptions import ConfigError, Interrupted
from chatlearn_core.plugins.observers import Observer, Observers

STALE = {"mode": "async", "max_staleness": 2}
SLOW = "roles.generator.options.seconds_per_token=0.001"
"""Slow enough that every weight sync finds unfinished completions."""
OWN = ("rollout/staleness/", "rollout/dropped_stale", "rollout/in_flight", "perf/updater_idle", "perf/generator_idle")
"""Metrics that ``sync`` does not have."""


def without(result: dict[str, Any], names: tuple[str, ...] = OWN) -> dict[str, Any]:
    lines = [{k: v for k, v in line.items() if not k.startswith(names)} for line in result["metrics"]]
    return {**result, "metrics": lines}


def admissions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def ends(folder: Path) -> dict[str, Any]:
    """Request -> the versions of its tokens."""
    return {line["request"]: line["ends"] for line in admissions(folder) if "request" in line}


def timed_lines(name: str, runs: Any) -> list[dict[str, Any]]:
    """Lines of metrics, with those that depend on time."""
    return [json.loads(line) for line in (runs.folder / name / "metrics.jsonl").read_text().splitlines()]


async def test_without_staleness_a_run_is_sync_bit_for_bit(runs: Any, completed: Any) -> None:
    expected = await completed("sync", {})
    found = await completed("async", {"mode": "async", "max_staleness": 0})
    assert without(found) == expected
    assert expected["metrics"][-1]["policy/grad_norm"] > 0, "something is learned"


async def test_steps_train_on_the_samples_of_sync_within_the_bound(runs: Any, completed: Any) -> None:
    """The order of the draws: no completion is left out, or trained on later, because it is long."""
    await completed("sync", {})
    found = await completed("async", STALE, SLOW)
    assert runs.trained("async") == runs.trained("sync")
    lines = found["metrics"]
    assert [line["rollout/staleness_max"] for line in lines] == [0, 1, 2, 2, 2, 2]
    assert [line["rollout/dropped_stale"] for line in lines] == [0] * 6
    assert [line["rollout/in_flight"] for line in lines] == [6, 6, 6, 6, 3, 0], "nothing is drawn in vain at the end"
    ages = [[line[f"rollout/staleness/{age}"] for age in range(3)] for line in lines]
    assert all(sum(of_step) == pytest.approx(1.0) for of_step in ages)
    assert ages[0] == [1, 0, 0]
    assert found["totals"]["samples/trained"] == 6 * 3 * 2
    record = admissions(runs.folder / "async")
    assert [(line["step"], line["version"]) for line in record if "step" in line] == [(n, n - 1) for n in range(1, 7)]
    requests = [line for line in record if "request" in line]
    assert len({line["request"] for line in requests}) == len(requests) == 36
    assert any(len(line["ends"]) > 1 for line in requests), "a weight sync within a completion"
    drawn = [json.loads(line) for line in (runs.folder / "async" / timeline.FILE).read_text().splitlines()]
    assert [line["step"] for line in drawn] == [1, 2, 3, 4, 5, 6]
    waited = [sum(stop - start for start, stop in line["waiting"]) for line in drawn]
    assert waited == pytest.approx(
        [line["timing_s/wait_for_rollouts"] for line in timed_lines("async", runs)], abs=0.01
    )
    for line in drawn:
        [(_, updated)], [(began, ended)] = line["updating"], line["syncing"]
        assert updated == pytest.approx(began, abs=1e-3)
        assert ended == pytest.approx(line["seconds"], abs=1e-6)
        assert len(line["generators"]["generator"]) == 2, "replicas"
    assert drawn[0]["generators"]["generator"][0], "a replica sampled"


@pytest.mark.parametrize(
    ("how", "fleet_rule", "backend"),
    [
        ("abort", "barrier", "fake"),
        ("pause", "barrier", "fake_keeping"),
        ("wait", "rolling", "fake"),
        ("continue", "rolling", "fake"),
        ("continue", "rolling", "fake_keeping"),
    ],
)
async def test_every_token_has_the_version_and_the_logprob_of_the_weights_that_sampled_it(
    how: str, fleet_rule: str, backend: str, runs: Any, completed: Any
) -> None:
    """The generator samples by keyed random numbers; here only that versions rise within a completion, and whether it
    has several, depends on what a weight sync does.
    """
    spans: list[list[tuple[int, int, int]]] = []

    def keep(step: int, samples: Any) -> None:
        spans.extend([(s.start, s.stop, s.version) for s in sample.turns[0].version_spans] for sample in samples)

    settings = (SLOW, f"weight_sync.fleet_rule={fleet_rule}", f"roles.generator.backend={backend}")
    run = runs.make(how, {**STALE, "options": {"during_sync": how}}, *settings)
    run.observers = Observers([Observer("chatlearn_rollout_end", "test 1", keep, ("step", "samples"))])
    await run.train()
    assert len(spans) == 36
    assert {span[0][2] for span in spans} > {0, 1}, "later weights sampled, too"
    for of_sample in spans:
        assert [start for start, _, _ in of_sample] == [0, *(stop for _, stop, _ in of_sample[:-1])]
        assert [version for _, _, version in of_sample] == sorted({version for _, _, version in of_sample})
    assert any(len(of_sample) > 1 for of_sample in spans) == (how != "wait")


@pytest.mark.parametrize("fleet_rule", ["barrier", "rolling"])
async def test_a_recorded_run_is_repeated_exactly(fleet_rule: str, runs: Any, completed: Any) -> None:
    """At another speed; with ``rolling`` each replica of the first run loads weights at a time of its own."""
    rule = f"weight_sync.fleet_rule={fleet_rule}"
    first = await completed("first", STALE, SLOW, rule)
    record = runs.folder / "first" / FILE
    again = await completed("again", {**STALE, "options": {"replay": str(record)}}, rule)
    timed = ("perf/updater_idle", "perf/generator_idle")
    assert without(again, timed) == without(first, timed)
    assert ends(runs.folder / "again") == ends(runs.folder / "first")
    assert sum(len(versions) > 1 for versions in ends(runs.folder / "first").values()) > 3
    sync = await completed("sync", {})
    assert sync["model"] != first["model"], "timing mattered"


@pytest.mark.parametrize("fleet_rule", ["barrier", "rolling"])
async def test_a_stopped_run_has_a_whole_record(fleet_rule: str, runs: Any, completed: Any) -> None:
    """What it made after its checkpoint, and lost, is not repeated."""
    rule = f"weight_sync.fleet_rule={fleet_rule}"
    settings = (SLOW, rule, "checkpoint.every=2")
    calls: Counter[str] = Counter()

    def interrupt() -> None:
        calls["all"] += 1
        if calls["all"] == 4:
            running.cancel()

    run = runs.make("first", STALE, *settings)
    run.observers = Observers([Observer("chatlearn_rollout_end", "test 1", interrupt, ())])
    running = asyncio.ensure_future(run.train())
    with pytest.raises(Interrupted):
        await running
    record = runs.folder / "first" / FILE
    lost = admissions(runs.folder / "first")
    steps = [line["step"] for line in lost if "step" in line]
    assert steps[-1] == 3, "the checkpoint is of step 2"
    first = await completed("first", STALE, *settings)
    again = await completed("again", {**STALE, "options": {"replay": str(record)}}, rule, "checkpoint.every=2")
    assert again["model"] == first["model"]
    assert again["rollouts"] == first["rollouts"]
    kept = [line["step"] for line in admissions(runs.folder / "first") if "step" in line]
    assert kept == [1, 2, 3, 4, 5, 6]


async def test_a_run_whose_completions_stay_in_the_engine_has_no_record(runs: Any, completed: Any) -> None:
    """Their further tokens come from a KV cache of old weights, which no repetition has."""
    settings = (SLOW, "weight_sync.fleet_rule=rolling", "roles.generator.backend=fake_keeping")
    await completed("first", STALE, *settings)
    assert not (runs.folder / "first" / FILE).exists()


async def test_a_record_of_another_run_is_refused(runs: Any, completed: Any) -> None:
    await completed("first", STALE, SLOW)
    record = runs.folder / "first" / FILE
    other = {**STALE, "options": {"replay": str(record)}}
    with pytest.raises(ConfigError, match=r"admissions.jsonl .rollout.options.replay. has sample .* It belongs to"):
        await runs.make("seeded", other, "seed=5").train()
    with pytest.raises(ConfigError, match=r"ends before the weight sync of step 7: this run is longer"):
        await runs.make("longer", other, "train.steps=8").train()
    whole = record.read_text()
    record.write_text(whole + "{}\n")
    damaged = rf"admissions.jsonl:{whole.count(chr(10)) + 1} .* is no record of a request or a weight sync: '{{}}'"
    with pytest.raises(ConfigError, match=damaged):
        await runs.make("damaged", other).train()
    record.unlink()
    with pytest.raises(ConfigError, match=r"which cannot be read: .* Name the admissions.jsonl of a run"):
        await runs.make("missing", other).train()


async def test_one_step_off_is_one_version_old_and_repeatable(runs: Any, completed: Any) -> None:
    first = await completed("first", {"mode": "one_step_off"}, SLOW)
    assert [line["rollout/staleness_mean"] for line in first["metrics"]] == [0, 1, 1, 1, 1, 1]
    again = await completed("again", {"mode": "one_step_off"})  # at another speed
    timed = ("perf/updater_idle", "perf/generator_idle")
    assert without(again, timed) == without(first, timed)


@pytest.mark.parametrize(
    ("mode", "fleet_rule", "stop"),
    [
        ("one_step_off", "barrier", "chatlearn_weights_synced"),
        ("async", "barrier", "chatlearn_rollout_end"),
        ("async", "barrier", "chatlearn_weights_synced"),
        ("async", "rolling", "chatlearn_checkpoint_saved"),
    ],
)
async def test_a_stopped_run_goes_on_with_what_was_in_flight(
    mode: str, fleet_rule: str, stop: str, runs: Any, completed: Any
) -> None:
    rollout = {"mode": mode} if mode == "one_step_off" else STALE
    settings = (SLOW, f"weight_sync.fleet_rule={fleet_rule}")
    undisturbed = await completed("undisturbed", rollout, *settings)
    calls: Counter[str] = Counter()

    def interrupt() -> None:
        calls["all"] += 1
        if calls["all"] == 4:
            running.cancel()

    run = runs.make("stopped", rollout, *settings)
    run.observers = Observers([Observer(stop, "test 1", interrupt, ())])
    running = asyncio.ensure_future(run.train())
    with pytest.raises(Interrupted):
        await running
    found = await completed("stopped", rollout, *settings)
    assert runs.trained("stopped") == runs.trained("undisturbed"), "nothing is lost or trained on twice"
    assert found["totals"] == undisturbed["totals"] or mode == "async"
    for name in ("samples/admitted", "samples/total", "samples/trained", "samples/excluded"):
        assert found["totals"][name] == undisturbed["totals"][name], name
    assert max(line["rollout/staleness_max"] for line in found["metrics"]) <= (2 if mode == "async" else 1)
    timed = ("perf/updater_idle", "perf/generator_idle")
    if mode == "one_step_off":
        assert without(found, timed) == without(undisturbed, timed)


async def test_dynamic_sampling_takes_the_next_draws_and_none_gets_too_old(runs: Any, completed: Any) -> None:
    runs.content["algorithm"]["name"] = "dapo"
    runs.content["algorithm"]["options"]["oversampling"] = 2
    found = await completed("dapo", STALE, SLOW, "sampling.max_tokens=3")
    lines = found["metrics"]
    assert sum(line.get("rollout/refills", 0) for line in lines) > 0, "groups of equal rewards are replaced"
    assert 0 < max(line["rollout/staleness_max"] for line in lines) <= 2
    assert sum(line.get("samples/excluded/stale", 0) for line in lines) == 0
    taken = [name for step in runs.trained("dapo") for name in step]
    assert len(set(taken)) == len(taken), "nothing is trained on twice"
