"""Rollouts of two turns in asynchronous runs: weight syncs come between turns and within them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.exceptions import Interrupted
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.observers import Observer, Observers
from chatlearn_core.plugins.records import EnvironmentSpec

STALE = {"mode": "async", "max_staleness": 2}
SLOW = ("roles.generator.options.seconds_per_token=0.001", "sampling.max_tokens=12")
SOURCE = """
class Again:
    def __init__(self, options, context): ...
    def setup(self): ...
    def close(self): ...

    num_turns = 2

    async def rollout(self, prompt, context):
        sequence = context.sequence()
        sequence.sampled(await context.generate(sequence.token_ids))
        if self.num_turns == 1:
            return context.finished([sequence])
        sequence.observed(context.tokenizer.encode("tea"))
        sequence.sampled(await context.generate(sequence.token_ids))
        return context.finished([sequence])
"""


@pytest.fixture
def two_turns(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs whose rollouts an environment makes, with an observation between two turns of the policy."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "again_environment.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(site))
    record = EnvironmentSpec(
        name="again", factory="again_environment:Again", options="chatlearn_testing.fakes.options:FakeOptions"
    )
    entry = PluginEntry(
        name=record.name, kind=record.kind, distribution="fakes", version="1", status="ok", record=record
    )
    runs.registry = replace(runs.registry, entries=(*runs.registry.entries, entry))
    runs.content["roles"]["again"] = {"kind": "environment", "backend": "again", "uses": {"policy": "generator"}}
    runs.content["algorithm"]["options"]["roles"] = {"environment": "again"}
    return runs


async def test_only_sampled_tokens_are_trained_on_whatever_weights_sampled_them(two_turns: Any, completed: Any) -> None:
    taken: list[Any] = []

    def keep(step: int, samples: Any) -> None:
        taken.extend((step, sample) for sample in samples)

    run = two_turns.make("async", {**STALE, "options": {"turns": "together"}}, *SLOW)
    run.observers = Observers([Observer("chatlearn_rollout_end", "test 1", keep, ("step", "samples"))])
    await run.train()
    assert len(taken) == 36
    versions = []
    for step, sample in taken:
        first, second = sample.turns
        assert sample.num_prompt_tokens == first.start
        assert second.start - first.stop == 3, "the letters of the observation"
        spans = [span for turn in (first, second) for span in turn.version_spans]
        assert [span.version for span in spans] == sorted(span.version for span in spans)
        assert spans[-1].version <= step - 1
        assert spans[0].version >= step - 1 - 2, "max_staleness"
        versions.append((first.version_spans, second.version_spans))
    assert any(first[0].version < second[-1].version for first, second in versions), "a sync within the rollout"
    assert any(len(spans) > 1 for both in versions for spans in both), "a sync within a turn"
    await completed("sync", {}, *SLOW[1:])
    assert two_turns.trained("async") == two_turns.trained("sync")


def test_the_plan_says_whether_a_slow_tool_delays_other_rollouts(two_turns: Any) -> None:
    free = "turns: each rollout asks for its next turn at once; a slow tool delays no other rollout"
    together = "turns: rollouts of a step ask for their next turn together; the slowest tool delays them all"
    assert free in two_turns.assemble("a", STALE).mode
    assert together in two_turns.assemble("b", {**STALE, "options": {"turns": "together"}}).mode
    assert together in two_turns.assemble("c", {"mode": "async", "max_staleness": 0}).mode
    assert together in two_turns.assemble("d", {"mode": "one_step_off"}).mode


async def test_a_rollout_of_one_turn_is_the_completion_of_generate_bit_for_bit(
    two_turns: Any, completed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import again_environment  # type: ignore[import-not-found]  # written by the fixture

    monkeypatch.setattr(again_environment.Again, "num_turns", 1)
    content = two_turns.content
    found = await completed("environment", {}, "train.steps=2")
    del content["roles"]["again"], content["algorithm"]["options"]["roles"]
    expected = await completed("generate", {}, "train.steps=2")
    assert found == expected
    assert expected["metrics"][-1]["policy/grad_norm"] > 0, "something is learned"


async def test_a_stopped_run_trains_on_every_rollout_once(two_turns: Any, completed: Any) -> None:
    calls: list[int] = []

    def interrupt() -> None:
        calls.append(len(calls))
        if len(calls) == 4:
            running.cancel()

    run = two_turns.make("stopped", STALE, *SLOW)
    run.observers = Observers([Observer("chatlearn_weights_synced", "test 1", interrupt, ())])
    running = asyncio.ensure_future(run.train())
    with pytest.raises(Interrupted):
        await running
    found = await completed("stopped", STALE, *SLOW)
    trained = [name for step in two_turns.trained("stopped") for name in step]
    assert len(trained) == len(set(trained)) == 36
    assert found["totals"]["samples/trained"] == 36
