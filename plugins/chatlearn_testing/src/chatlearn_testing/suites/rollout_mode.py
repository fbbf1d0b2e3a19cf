"""The contract of a rollout mode: runs train on the draws of ``sync``, each once, with tokens of known weights."""

from __future__ import annotations

import math
import re
from typing import ClassVar

import pytest

from chatlearn_core.exceptions import Interrupted
from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.rollout_producer import Production
from chatlearn_core.executor.step_samples import FinishedGroup
from chatlearn_core.metrics import Timers
from chatlearn_core.plugins.records import Kind
from chatlearn_core.types import Metric, Sample
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, nothing_changes
from chatlearn_testing.suites.light_imports import LightImports
from chatlearn_testing.suites.rollout_mode_endings import RolloutModeEndings
from chatlearn_testing.suites.rollout_mode_fixtures import (
    GROUP_SIZE,
    PROMPTS_PER_STEP,
    SLOW,
    STEPS,
    ModeStand,
    check_equal,
    check_versions,
)

ASKS_AGAIN = ("algorithm.options.replace_equal=true", "sampling.max_tokens=3")
"""Short completions, most of which have no reward: a step asks for further groups in place of most."""
RISING = ('schedules=[{"setting": "sampling.max_tokens", "name": "fake", "options": {"start": 6, "per_step": 3}}]',)
"""Sampling parameters that differ from step to step."""
METRIC_NAME = re.compile(r"[a-z][a-z0-9_]*(/[A-Za-z0-9_.@-]+)*")


class RolloutModeConformance(RolloutModeEndings, LightImports):
    """Contract tests that every rollout mode must pass, in short runs on the kit's fakes in this process.

    A subclass sets ``backend`` and ``options``, and says what is not true of the mode: see ``settable``. A staleness
    that the mode's ``plan`` refuses is not tested. A mode that makes no rollouts is tested on those that the function
    ``record`` of its record writes; its options then have a field ``directory``.
    """

    kind: ClassVar[Kind] = "rollout_mode"
    settable: ClassVar[frozenset[str]] = ConformanceSuite.settable | {"repeatable", "overrides"}
    repeatable: ClassVar[bool] = True
    """False for a mode in which timing decides which policy version samples a token."""
    overrides: ClassVar[tuple[str, ...]] = ()
    """Settings of every run that the mode needs, as on the command line: ``weight_sync.fleet_rule=rolling``."""

    # The plan

    def test_the_plan_says_what_happens_when(self, stand: ModeStand, capfd: pytest.CaptureFixture[str]) -> None:
        """``plan`` returns at least one line of text, the same for the same configuration, and changes nothing.

        It is called when a configuration is validated, on any machine: it starts nothing and writes nothing.
        """
        assembly = stand.make("planned", None).run.assembly
        options, loaded, graph = assembly.loaded.plugin("rollout").options, assembly.loaded, assembly.graph
        before = options.model_dump_json(), len(graph.nodes)
        with nothing_changes(capfd):
            lines, again = self._plan(assembly), self._plan(assembly)
        assert lines, "the plan says nothing; say what generators and trainers do at the same time"
        wrong = [line for line in lines if not isinstance(line, str) or not line.strip() or "\n" in line]
        assert not wrong, f"a line of the plan is not one line of text: {wrong[0]!r}"
        assert lines == again, f"the plan differs when it is asked again: {lines} and {again}"
        assert before == (options.model_dump_json(), len(graph.nodes)), "the plan changed the options or the flow"
        of_sync = stand.runs.assemble("planned", {}, *stand.overrides).loaded.config  # made without the mode's plan
        found, expected = (config.model_dump(exclude={"rollout"}) for config in (loaded.config, of_sync))
        changed = [name for name, value in expected.items() if found[name] != value]
        assert not changed, f"the plan changed the configuration: {', '.join(changed)}"

    # Steps

    @pytest.mark.parametrize("settings", [(), ASKS_AGAIN, RISING], ids=["plain", "asks_again", "schedule"])
    def test_without_staleness_a_run_is_sync(self, stand: ModeStand, settings: tuple[str, ...]) -> None:
        """With ``rollout.max_staleness: 0`` a run has the weights, samples and metrics of ``sync``, bit for bit.

        Further metrics are the mode's own; those of the core keep their names and values. Usual causes: seeds,
        sampling parameters of the step (``decisions.sampling_at``) or the order of requests differ from those of
        ``RolloutProducer``, or a sample is drawn before the step that trains on it.
        """
        stand.require_rollouts()
        if refusal := stand.refusal(0):
            not_applicable(f"the plan refuses rollout.max_staleness 0: {refusal}")
        expected, found = stand.result(stand.sync(*settings)), stand.result(stand.undisturbed(0, *settings))
        assert any(line["policy/grad_norm"] > 0 for line in expected["metrics"]), "something is learned"
        check_equal(found, expected, "sync")

    def test_the_first_step_is_that_of_sync(self, stand: ModeStand) -> None:
        """No token can be stale in the first step, so it trains on the tokens that ``sync`` samples, bit for bit."""
        expected, found = stand.sync(*SLOW), stand.undisturbed(None, *SLOW)
        for one, other in zip(found.samples[1], expected.samples[1], strict=True):
            same = one.id == other.id and one.token_ids.tolist() == other.token_ids.tolist()
            assert same, f"the first step trains on {one.id}: {one.token_ids.tolist()}, not on {other.id}"

    def test_steps_train_on_the_draws_of_sync(self, stand: ModeStand) -> None:
        """Every step trains on the groups, whole, that ``sync`` would draw for it; nothing is drawn in vain.

        A mode that trains first on what ends first would prefer short completions. Near the end of a run, no group
        may be drawn that no step trains on.
        """
        expected = stand.sync()
        for staleness in stand.staleness():
            found = stand.undisturbed(staleness, *SLOW)
            where = f"with rollout.max_staleness {staleness}"
            for step, (one, other) in enumerate(zip(found.trained, expected.trained, strict=True), 1):
                assert one == other, f"{where}, step {step} trains on {one} instead of {other}"
            excluded = [sample.exclusion for samples in found.samples.values() for sample in samples]
            assert set(excluded) == {None}, f"{where}, samples are excluded: {excluded}"
            if self.record().makes_rollouts:
                assert found.num_drawn == STEPS * PROMPTS_PER_STEP, (
                    f"{where}, {found.num_drawn} groups were drawn for {STEPS} steps of {PROMPTS_PER_STEP}"
                )
            assert not found.run.producer.pending, f"{where}, groups are in flight after the last step"

    def test_every_token_is_of_the_weights_of_its_version(self, stand: ModeStand) -> None:
        """No token is older than ``rollout.max_staleness``; versions rise within a completion, and cover it; each
        token's logprob is that of the weights of its version.

        Usual causes: more groups in flight than (max_staleness + 1) steps train on, or a resumed completion that is
        given the versions or logprobs of another.
        """
        stand.require_rollouts()
        for staleness in stand.staleness():
            found = stand.undisturbed(staleness, *SLOW)
            allowed = stand.allowed(staleness)
            ages = check_versions(found.samples, stand.weights(found), allowed)
            assert max(ages) > 0 or not allowed, (
                f"tokens may be {allowed} policy version(s) old, but all are of the newest: nothing is made ahead. Set "
                "max_staleness=0 in the record"
            )

    def test_productions_are_whole(self, stand: ModeStand) -> None:
        """``produce`` returns a ``Production`` of at least the groups that it was asked for, each with all of its
        samples; metrics are ``Metric`` objects of finite numbers, and timers its own.
        """
        for staleness in stand.staleness():
            productions = stand.undisturbed(staleness, *SLOW).productions
            for missing, production in productions:
                assert isinstance(production, Production), f"produce returns Production, not {production!r:.80}"
                count = len(production.groups)
                assert count >= missing, f"produce was asked for {missing} groups and returned {count}"
                for group in production.groups:
                    assert isinstance(group, FinishedGroup), f"groups are FinishedGroup, not {group!r:.80}"
                    assert len(group.requests) == GROUP_SIZE, f"group {group.id} has {len(group.requests)} requests"
                    filled = all(isinstance(request.sample, Sample) for request in group.requests)
                    assert filled, f"a request of group {group.id} has no sample"
                _check_metrics(production)
                assert isinstance(production.timers, Timers), f"timers is {production.timers!r:.80}"
            timers = {id(production.timers) for _, production in productions}
            assert len(timers) == len(productions), "two productions share their timers: each step counts its own time"

    def test_an_algorithm_that_asks_again_gets_more(self, stand: ModeStand) -> None:
        """A step whose algorithm replaces groups (dynamic sampling) gets the next draws; none is lost or comes twice.

        ``produce`` is then called several times with the same step, each time with the number that is missing.
        """
        stand.require_rollouts()
        expected = stand.sync(*ASKS_AGAIN)
        order = [draw.group_id for draw in stand.make(stand.name("order"), None).run.sampler.next_batch(200)]
        assert any(len(step) > PROMPTS_PER_STEP * GROUP_SIZE for step in expected.trained), "a step asks again"
        for staleness in stand.staleness():
            found = stand.undisturbed(staleness, *SLOW, *ASKS_AGAIN)
            where = f"with rollout.max_staleness {staleness}"
            taken = [name for step in found.trained for name in step]
            assert len(set(taken)) == len(taken), f"{where}, a sample is trained on twice"
            assert found.groups == order[: len(found.groups)], f"{where}, groups do not come in the order of the draws"
            left = [group.id for group in found.run.producer.pending]
            left += [group.id for group in found.run.buffer.groups]
            assert sorted([*found.groups, *left]) == sorted(order[: found.num_drawn]), (
                f"{where}, {found.num_drawn} groups were drawn: {len(found.groups)} trained on, {len(left)} in flight"
            )
            check_versions(found.samples, stand.weights(found), stand.allowed(staleness))

    # What remains

    def test_nothing_outlives_a_run(self, stand: ModeStand) -> None:
        """A run, and one that is stopped, leave no task, thread or process, and no file outside their directories."""
        stand.undisturbed(None, *SLOW)  # starts and imports what is shared by all runs
        with self.nothing_is_left(kept=stand.runs.folder):
            stand.finish(stand.make(stand.name("left"), None, *SLOW))
            stopped = stand.make(stand.name("left"), None, *SLOW, stop=("chatlearn_rollout_end", 2))
            with pytest.raises(Interrupted):
                stand.run(stopped.train())

    # Recordings

    def test_what_is_recorded_is_what_sync_samples(self, stand: ModeStand) -> None:
        """``record`` writes the rollouts of every step with the weights of ``model.path``, trains nothing, and returns
        the directory for the option ``directory``; called again, it finds them complete.
        """
        self._require_record()
        folder = stand.recorded(*SLOW)
        assert folder.is_dir(), f"record returned {folder}, which is no directory"
        assert not (folder / "model").exists(), "a recording exports no model"
        before = {file: file.stat().st_mtime_ns for file in folder.rglob("step_*/*")}
        assert before, "nothing was recorded"
        assert stand.record(folder.name, *SLOW) == folder
        assert {file: file.stat().st_mtime_ns for file in folder.rglob("step_*/*")} == before, "it was recorded again"

    def test_recorded_rollouts_are_trained_on(self, stand: ModeStand) -> None:
        """A run trains on the recorded tokens, all of the weights of ``model.path``, in the order of the draws."""
        self._require_record()
        found = stand.undisturbed(None, *SLOW)
        first = stand.weights(found)[0]
        assert check_versions(found.samples, dict.fromkeys(range(STEPS), first), STEPS - 1) == set(range(STEPS)), (
            "of version 0"
        )
        assert found.trained == stand.sync(*SLOW).trained, "the draws are not those of sync"

    # Internal methods

    def _require_record(self) -> None:
        if self.record().record is None:
            not_applicable("the record has no function record")

    def _plan(self, assembly: Assembly) -> list[str]:
        return list(self.build("plan")(assembly.loaded.plugin("rollout").options, assembly.loaded, assembly.graph))


def _check_metrics(production: Production) -> None:
    for name, metric in production.metrics.items():
        assert METRIC_NAME.fullmatch(str(name)), f"{name!r} is no name of a metric"
        assert isinstance(metric, Metric), f"metric {name} is {metric!r}, not a Metric"
        assert math.isfinite(metric.value), f"metric {name} is {metric}"
