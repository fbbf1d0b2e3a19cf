"""The contract of a rollout mode: it changes when rollouts are made, never which, how often or with whose weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import BackendError, ConfigError, Interrupted
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.observers import Observer, Observers
from chatlearn_core.plugins.records import Kind
from chatlearn_core.types import GenerateRequest, Sample
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.fakes.bigram import bigram_logits, build_bigram_model
from chatlearn_testing.fakes.generator import FakeGenerator
from chatlearn_testing.suites.conformance_suite import installed_plugins
from chatlearn_testing.suites.light_imports import LightImports
from chatlearn_testing.suites.rollout_mode_runs import (
    GROUP_SIZE,
    PROMPTS_PER_STEP,
    SLOW,
    STEPS,
    ModeRuns,
    with_fakes,
)

Samples = list[list[Sample]]
"""The samples of each step."""
ABSOLUTE = 1e-4
"""Largest error of a float32 logprob, nats."""
FEW = "train.steps=3"
BROKEN = "it is broken on purpose"


class RolloutModeConformance(LightImports):
    """Contract tests that every rollout mode must pass. A subclass sets ``backend``.

    Runs of six steps train a bigram model with ``grpo`` on the local runtime, with two replicas. A mode that makes no
    rollouts (``makes_rollouts``) reads those that the function ``record`` of its own record wrote; its option
    ``directory_option`` names their directory.
    """

    kind: ClassVar[Kind] = "rollout_mode"
    settable: ClassVar[frozenset[str]] = frozenset({"directory_option"})
    directory_option: ClassVar[str | None] = None
    """Option that names the directory of written rollouts, for a mode that makes none."""

    @pytest.fixture
    def runs(self, tmp_path: Path) -> ModeRuns:
        """Makes the runs of one test."""
        registry = with_fakes(installed_plugins(), self.record())
        return ModeRuns(tmp_path, build_bigram_model(tmp_path / "bigram"), registry)

    def test_the_plan_says_what_runs_together(self, runs: ModeRuns) -> None:
        """``plan`` returns sentences, the same each time, and leaves the configuration as it is."""
        assembly = runs.assemble("planned", self._rollout(self._recorded(runs)))
        before = runs.assemble("planned", {}).loaded.config.model_dump(exclude={"rollout"})
        made = assembly.loaded.chosen("rollout")
        assert made is not None
        plan = self.build("plan")
        first, second = (plan(made.options, assembly.loaded, assembly.graph) for _ in range(2))
        assert list(first) == list(second), "the second plan differs from the first"
        assert first, "the plan of a run says nothing about the mode"
        assert all(isinstance(line, str) and line.strip() for line in first), f"{first} are no sentences"
        found = assembly.loaded.config.model_dump(exclude={"rollout"})
        changed = [name for name, value in before.items() if found[name] != value]
        assert not changed, f"the plan changed the configuration: {', '.join(changed)}"

    def test_without_staleness_it_is_sync(self, runs: ModeRuns) -> None:
        """With ``rollout.max_staleness: 0`` a run leaves the weights, rollouts and totals of ``sync`` bit for bit, and
        every metric of ``sync`` that does not depend on time.
        """
        self._require_rollouts()
        expected = self._completed(runs, "sync", {})
        found = self._completed(runs, "mode", self._rollout(max_staleness=0))
        assert _differences(found, expected) == [], "differs from sync"

    def test_steps_train_on_the_samples_of_sync(self, runs: ModeRuns) -> None:
        """Each step takes as many groups as it is to, in the order of the draws. So nothing is left out, or comes
        later, because it is long, and nothing is trained on twice or too old.

        Usual causes: groups in the order in which they finish, groups drawn in vain at the end, more in flight than the
        bound on staleness allows.
        """
        self._completed(runs, "sync", {})
        self._completed(runs, "mode", self._rollout(self._recorded(runs)), SLOW)
        trained = runs.trained("mode")
        assert [len(step) for step in trained] == [PROMPTS_PER_STEP * GROUP_SIZE] * STEPS, "samples a step"
        assert trained == runs.trained("sync"), "steps train on other samples than those of sync"
        if self.record().makes_rollouts:
            oldest = max(line["rollout/staleness_max"] for line in runs.metrics("mode"))
            assert oldest <= self.record().max_staleness, f"tokens of {oldest:g} versions before were trained on"

    def test_an_algorithm_that_asks_again_gets_other_samples(self, runs: ModeRuns) -> None:
        """Within a step, ``dapo`` asks for groups in place of those whose rewards are equal. No sample comes twice."""
        self._require_rollouts()
        runs.content["algorithm"]["name"] = "dapo"
        runs.content["algorithm"]["options"]["oversampling"] = 2
        self._completed(runs, "mode", self._rollout(), SLOW, "sampling.max_tokens=3")
        assert sum(line.get("rollout/refills", 0) for line in runs.metrics("mode")) > 0, "no step asked again"
        taken = [name for step in runs.trained("mode") for name in step]
        assert len(set(taken)) == len(taken), "a sample came twice"

    def test_every_token_has_the_version_and_logprob_of_its_weights(self, runs: ModeRuns) -> None:
        """Version spans cover a completion without gaps, and versions rise; each logprob is that of the weights of its
        version, which the checkpoints of the run hold.
        """
        self._require_rollouts()
        steps = self._samples_of(runs, "mode", self._rollout(), SLOW)
        weights = [runs.weights("mode", version) for version in range(STEPS)]
        versions: set[int] = set()
        for sample in (sample for step in steps for sample in step):
            [turn] = sample.turns
            spans = [(span.start, span.stop, span.version) for span in turn.version_spans]
            tokens = torch.tensor(np.asarray(sample.token_ids))
            count, first = sample.num_completion_tokens, sample.num_prompt_tokens
            edges = [0, *(stop for _, stop, _ in spans)]
            assert [start for start, _, _ in spans] == edges[:-1], f"{sample.id}: spans {spans} leave a gap or overlap"
            assert edges[-1] == count, f"{sample.id}: spans cover {edges[-1]} of {count} tokens"
            assert all(one < next_ for (*_, one), (*_, next_) in pairwise(spans)), f"{sample.id}: versions {spans}"
            logprobs = np.asarray(sample.token_data["generator_logprobs"])[-count:]
            for start, stop, version in spans:
                place = torch.arange(first + start, first + stop)
                expected = bigram_logits(*weights[version], tokens[place - 1]).log_softmax(-1)
                expected = expected.gather(-1, tokens[place, None])[:, 0]
                apart = float((torch.tensor(logprobs[start:stop]).double() - expected).abs().max())
                assert apart <= ABSOLUTE, f"{sample.id}: logprobs of version {version} are {apart:.2g} off"
                versions.add(version)
        assert len(versions) > 1, "all tokens come from the first weights"

    def test_a_stopped_run_goes_on(self, runs: ModeRuns) -> None:
        """A run that was stopped in any phase goes on from its checkpoint with what was in flight: every draw is
        trained on once, in the step in which it would have been.
        """
        rollout = self._rollout(self._recorded(runs))
        self._completed(runs, "whole", rollout, SLOW)
        for phase in ("chatlearn_rollout_end", "chatlearn_weights_synced", "chatlearn_checkpoint_saved"):
            if phase == "chatlearn_weights_synced" and not self.record().makes_rollouts:
                continue
            self._run(self._stopped(runs, phase, rollout, phase))
            self._completed(runs, phase, rollout, SLOW)
            assert runs.trained(phase) == runs.trained("whole"), f"stopped at {phase}, it trains on other samples"
            names = ("samples/total", "samples/trained", "samples/excluded")
            found, expected = ([runs.result(name)["totals"][n] for n in names] for name in (phase, "whole"))
            assert found == expected, f"stopped at {phase}, {names} are {found} instead of {expected}"

    def test_an_error_ends_the_run(self, runs: ModeRuns, monkeypatch: pytest.MonkeyPatch) -> None:
        """What fails while rollouts are made ends the run with that error, even if no step waits for them; no task
        outlives the run.
        """
        self._require_rollouts()
        self._completed(runs, "sync", {}, FEW)
        of_second_step, generate = set(runs.trained("sync")[1]), FakeGenerator.generate

        async def breaking(self: FakeGenerator, request: GenerateRequest, *arguments: Any) -> Any:
            if request.id in of_second_step:
                raise BackendError(BROKEN)
            return await generate(self, request, *arguments)

        monkeypatch.setattr(FakeGenerator, "generate", breaking)

        async def fails() -> None:
            with pytest.raises(BackendError, match=BROKEN):
                await runs.make("broken", self._rollout(), SLOW).train()

        self._run(fails())

    def test_metrics_are_finite(self, runs: ModeRuns) -> None:
        """Every metric that the mode adds to those of ``sync`` is a finite number."""
        self._completed(runs, "mode", self._rollout(self._recorded(runs)), FEW)
        for step, line in enumerate(runs.metrics("mode"), 1):
            odd = [name for name, value in line.items() if not np.isfinite(value)]
            assert not odd, f"step {step}: {', '.join(odd)} is not finite"

    def test_nothing_outlives_a_run(self, runs: ModeRuns, tmp_path: Path) -> None:
        """A run, and one that is cancelled, leave no task, thread or process, and no file outside their directories."""
        rollout = self._rollout(self._recorded(runs))
        with self.nothing_is_left(kept=tmp_path):
            self._completed(runs, "whole", rollout, FEW)
            self._run(self._stopped(runs, "cancelled", rollout, "chatlearn_rollout_end"))

    def test_written_rollouts_are_those_of_sync(self, runs: ModeRuns) -> None:
        """``record`` writes the rollouts of every step and trains nothing; the mode then trains on exactly these: the
        first step equals that of ``sync``.
        """
        if self.record().record is None:
            not_applicable("the record has no function 'record'")
        directory = self._recorded(runs)
        assert directory is not None, "a mode that makes rollouts does not read any: remove 'record'"
        assert not (Path(directory) / "model").exists(), "a recording trains nothing"
        expected = self._completed(runs, "sync", {}, "train.steps=1")
        found = self._completed(runs, "mode", self._rollout(directory), "train.steps=1")
        assert found["rollouts"] == expected["rollouts"], "the first step trains on other rollouts"
        assert found["model"] == expected["model"], "the first step leaves other weights"

    # Internal methods

    def _require_rollouts(self) -> None:
        if not self.record().makes_rollouts:
            not_applicable("the record declares makes_rollouts=False")

    def _rollout(self, directory: str | None = None, **fields: Any) -> dict[str, Any]:
        """The section ``rollout`` of a configuration."""
        options = dict(self.options)
        if directory is not None:
            assert self.directory_option is not None, "the mode makes no rollouts: set directory_option"
            options[self.directory_option] = directory
        return {"mode": self.record().name, **({"options": options} if options else {}), **fields}

    def _recorded(self, runs: ModeRuns) -> str | None:
        """The directory of rollouts that ``record`` has written; None for a mode that makes its own."""
        if self.record().makes_rollouts:
            return None
        assert self.record().record is not None, "makes_rollouts=False needs 'record': who else would write rollouts?"
        record = resolve_import_string(self.record().record)
        directory: Path = self._run(record(runs.assemble("recorded", {}), None))
        return str(directory)

    def _completed(self, runs: ModeRuns, name: str, rollout: Mapping[str, Any], *overrides: str) -> dict[str, Any]:
        """Make a run, and return its result; one of ``max_staleness: 0`` may be refused."""
        try:
            run = runs.make(name, rollout, *overrides)
        except ConfigError as error:
            if rollout.get("max_staleness") != 0:
                raise
            not_applicable(f"the mode refuses max_staleness 0: {error}")
        summary = self._run(run.train())
        assert summary["status"] == "completed", summary["status"]
        return runs.result(name)

    def _samples_of(self, runs: ModeRuns, name: str, rollout: Mapping[str, Any], *overrides: str) -> Samples:
        """Make a run, and return the samples that each step took."""
        taken: Samples = []

        def keep(samples: Sequence[Sample]) -> None:
            taken.append(list(samples))

        run = runs.make(name, rollout, *overrides)
        run.observers = Observers([Observer("chatlearn_rollout_end", "the suite", keep, ("samples",))])
        self._run(run.train())
        return taken

    async def _stopped(self, runs: ModeRuns, name: str, rollout: Mapping[str, Any], phase: str) -> None:
        """Make a run that is cancelled at the second call of a hook."""
        calls: list[int] = []

        def interrupt() -> None:
            calls.append(1)
            if len(calls) == 2:
                running.cancel()

        run = runs.make(name, rollout, SLOW)
        run.observers = Observers([Observer(phase, "the suite", interrupt, ())])
        running = asyncio.ensure_future(run.train())
        with pytest.raises(Interrupted):
            await running

    def _run(self, work: Awaitable[Any]) -> Any:
        """Run a coroutine for at most ``patience_s``; it must leave no task."""

        async def bounded() -> Any:
            found = await asyncio.wait_for(work, self.patience_s)
            await asyncio.sleep(0)
            left = [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}]
            assert not left, f"tasks outlive the run: {', '.join(left)}"
            return found

        return asyncio.run(bounded())


def _differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Name what differs from a run of ``sync``; further metrics are allowed."""
    wrong = [name for name in ("model", "rollouts", "totals") if found[name] != expected[name]]
    for step, (line, other) in enumerate(zip(found["metrics"], expected["metrics"], strict=True), 1):
        wrong += [f"{name} of step {step}" for name, value in other.items() if line.get(name) != value]
    return wrong
