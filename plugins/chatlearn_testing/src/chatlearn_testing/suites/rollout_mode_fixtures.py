"""Fixtures of the rollout modes' suite: whole runs on the fakes, and what is seen of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.executor.rollout_producer import Production
from chatlearn_core.executor.rollouts.pending import Group
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.observers import Observer, Observers
from chatlearn_core.types import Sample
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.fakes.bigram import TRANSITION, UNIGRAM, bigram_logits, build_bigram_model, read_bigram_tensors
from chatlearn_testing.fakes.records import FAKE_WEIGHT_SYNC
from chatlearn_testing.fakes.trainer import CHECKPOINT_FILE
from chatlearn_testing.leftovers import written_files
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, installed_plugins
from chatlearn_testing.suites.rollout_mode_faults import FAULTS
from chatlearn_testing.whole_runs import WholeRuns, registry_with

T = TypeVar("T")
STEPS, PROMPTS_PER_STEP, GROUP_SIZE, NUM_PROMPTS = 6, 3, 2, 16
SLOW = (
    "roles.generator.options.seconds_per_token=0.001",
    "roles.trainer.backend=faulty",
    "roles.trainer.options.seconds_per_update=0.006",
)
"""Slow enough that at a weight sync some completions are finished, and others have some of their tokens."""
LEARNING_RATE = 60.0
"""So large that each policy version samples other tokens."""


@dataclass(slots=True, eq=False)
class WatchedRun:
    """A run, and what was seen of it."""

    run: Run
    stop: tuple[str, int] | None = None
    """A hook, and the number of its call at which the run is cancelled; None: it is not."""
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """Step -> its samples, with copies of their arrays."""
    productions: list[tuple[int, Production]] = field(default_factory=list)
    """Number of groups that the run asked for, and what the producer handed over."""
    pending: list[tuple[tuple[Group, ...], str]] = field(default_factory=list)
    """After each step: what was in flight, and its description at that time."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the producer is asked for groups."""
    _calls: int = 0
    _task: asyncio.Task[object] | None = None

    def __post_init__(self) -> None:
        functions: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
            "chatlearn_run_start": (self._watch_producer, ()),
            "chatlearn_rollout_end": (self._keep_samples, ("step", "samples")),
            "chatlearn_step_end": (self._keep_pending, ()),
        }
        observers = [Observer(hook, "conformance 1", function, names) for hook, (function, names) in functions.items()]
        if self.stop is not None:
            observers.append(Observer(self.stop[0], "conformance 1", self._count, ()))
        self.run.observers = Observers(observers, strict=True)

    async def train(self) -> dict[str, Any]:
        """Run to the end, or to the stop."""
        self._task = asyncio.current_task()
        return await self.run.train()

    @property
    def trained(self) -> list[list[str]]:
        """Ids of the samples of each step, in order."""
        return ids_of(self.samples)

    @property
    def groups(self) -> list[str]:
        """Ids of the groups, in the order in which they were trained on."""
        return list(dict.fromkeys(sample.group_id for step in sorted(self.samples) for sample in self.samples[step]))

    @property
    def num_drawn(self) -> int:
        """Number of draws of the run's sampler."""
        return round(sum(self.run.sampler.epochs.values()) * NUM_PROMPTS)

    def _watch_producer(self) -> None:
        producer = self.run.producer
        produce = producer.produce

        async def watched(step: int, missing: int) -> Production:
            self.asked.set()
            production = await produce(step, missing)
            self.productions.append((missing, production))
            return production

        producer.produce = watched  # type: ignore[method-assign]  # of this object alone

    def _keep_samples(self, step: int, samples: list[Sample]) -> None:
        self.samples[step] = samples

    def _keep_pending(self) -> None:
        pending = self.run.producer.pending
        self.pending.append((pending, described(pending)))

    def _count(self) -> None:
        self._calls += 1
        assert self.stop is not None
        if self._calls == self.stop[1]:
            assert self._task is not None, "hooks are called while it trains"
            self._task.cancel()


def ids_of(samples: Mapping[int, Sequence[Sample]]) -> list[list[str]]:
    """Ids of the samples of each step, in order."""
    return [[sample.id for sample in samples[step]] for step in sorted(samples)]


def described(pending: tuple[Group, ...]) -> str:
    """Describe groups in flight: ids, and how far each sample is."""
    assert isinstance(pending, tuple), f"pending is a tuple of Group, not {type(pending).__name__}"
    lines = []
    for group in pending:
        assert isinstance(group, Group), f"pending has {type(group).__name__}; its entries are Group"
        made = [sum(progress.num_tokens for progress in (one, *one.turns.values())) for one in group.progress]
        filled = [len(request.sample.token_ids) if request.sample is not None else None for request in group.requests]
        lines.append([group.id, group.is_finished, made, filled])
    return json.dumps(lines)


@dataclass
class ModeStand:
    """Makes runs with the rollout mode under test, and with ``sync``."""

    suite: type[ConformanceSuite]
    runs: WholeRuns
    overrides: tuple[str, ...]
    """Those of the suite, for every run."""
    _finished: dict[tuple[object, ...], WatchedRun] = field(default_factory=dict)
    _recorded: dict[tuple[str, ...], Path] = field(default_factory=dict)
    _refusals: dict[int, str | None] = field(default_factory=dict)
    _number: int = 0

    def section(self, staleness: int | None, *overrides: str) -> dict[str, Any]:
        """The section ``rollout`` of a run; a mode that makes no rollouts gets what its record's function wrote."""
        record, options = self.suite.record(), dict(self.suite.options)
        if not record.makes_rollouts:
            options = {"directory": str(self.recorded(*overrides)), **options}
        section: dict[str, Any] = {"mode": record.name, "options": options}
        return section if staleness is None else {**section, "max_staleness": staleness}

    def make(
        self, name: str, staleness: int | None, *overrides: str, stop: tuple[str, int] | None = None
    ) -> WatchedRun:
        """Build a run with the mode; one of the same name goes on where it stopped."""
        section = self.section(staleness, *overrides)
        return WatchedRun(self.runs.make(name, section, *self.overrides, *overrides), stop)

    def refusal(self, staleness: int) -> str | None:
        """Why the mode's plan refuses a staleness; None if it does not."""
        if staleness not in self._refusals:
            try:
                self.make("refused", staleness)
                self._refusals[staleness] = None
            except ConfigError as error:
                self._refusals[staleness] = str(error)
        return self._refusals[staleness]

    def staleness(self) -> list[int | None]:
        """Values of ``rollout.max_staleness`` to test: None, which is the record's, and a larger one if the plan takes
        it.
        """
        larger = self.suite.record().max_staleness + 1
        return [None] if not self.suite.record().makes_rollouts or self.refusal(larger) else [None, larger]

    def allowed(self, staleness: int | None) -> int:
        """The greatest age of tokens, policy versions."""
        record = self.suite.record()
        if not record.makes_rollouts:
            return STEPS - 1  # recorded by the model's own weights
        return int(record.max_staleness if staleness is None else staleness)

    def require_rollouts(self) -> None:
        """Skip the test if the mode makes no rollouts."""
        if not self.suite.record().makes_rollouts:
            not_applicable("the record declares makes_rollouts=False")

    def sync(self, *overrides: str) -> WatchedRun:
        """A finished run with ``sync``; made once."""
        key = ("sync", *overrides)
        if key not in self._finished:
            made = WatchedRun(self.runs.make(self.name("sync"), {}, *self.overrides, *overrides))
            self.finish(made)
            self._finished[key] = made
        return self._finished[key]

    def undisturbed(self, staleness: int | None, *overrides: str) -> WatchedRun:
        """A finished run with the mode; made once."""
        key = (staleness, *overrides)
        if key not in self._finished:
            made = self.make(self.name("undisturbed"), staleness, *overrides)
            self.finish(made)
            self._finished[key] = made
        return self._finished[key]

    def recorded(self, *overrides: str) -> Path:
        """The directory that the record's function wrote, from the model's own weights; made once."""
        if overrides not in self._recorded:
            self._recorded[overrides] = self.record(self.name("recorded"), *overrides)
        return self._recorded[overrides]

    def record(self, name: str, *overrides: str) -> Path:
        """Call the record's function for a run of this name."""
        assembly = self.runs.assemble(name, {}, *self.overrides, *overrides)
        record: Callable[..., Coroutine[Any, Any, Path]] = resolve_import_string(self.suite.record().record)
        return self.run(record(assembly, RunListener()))

    def name(self, prefix: str) -> str:
        """A name that no run has yet."""
        self._number += 1
        return f"{prefix}-{self._number}"

    def folder(self, watched: WatchedRun) -> Path:
        """The directory of a run."""
        return watched.run.assembly.plan.run_dir

    def result(self, watched: WatchedRun) -> dict[str, Any]:
        """What a finished run left that does not depend on time."""
        return self.runs.result(self.folder(watched).name)

    def finish(self, watched: WatchedRun) -> None:
        """Run to the end."""
        summary = self.run(watched.train())
        assert summary["status"] == "completed", summary["status"]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine for at most ``patience_s``; no task may remain, and no file outside the runs' directory."""

        async def bounded() -> T:
            task = asyncio.ensure_future(work)
            await asyncio.wait([task], timeout=self.suite.patience_s)
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=self.suite.patience_s)
                pytest.fail(f"the run is not over after {self.suite.patience_s:g} s", pytrace=False)
            left = [str(one.get_coro()) for one in asyncio.all_tasks() if one is not asyncio.current_task()]
            assert not left, f"tasks outlive the run: {'; '.join(left)[:500]}"
            return task.result()

        with written_files() as written:
            done = asyncio.run(bounded())
        outside = sorted(file for file in written if not file.startswith(str(self.runs.folder)))
        assert not outside, f"written outside the run directory: {', '.join(outside[:5])}"
        return done

    def weights(self, watched: WatchedRun) -> Mapping[int, Mapping[str, torch.Tensor]]:
        """The tensors of each policy version of a run that wrote a checkpoint after each step."""
        found = {0: read_bigram_tensors(self.runs.model)}
        for step in range(1, STEPS + 1):
            [file] = (self.folder(watched) / "checkpoints" / f"step_{step:08d}").rglob(CHECKPOINT_FILE)
            found[step] = load_file(file)
        return found


def check_versions(
    samples_of: Mapping[int, Sequence[Sample]], weights: Mapping[int, Mapping[str, torch.Tensor]], oldest: int
) -> set[int]:
    """Check every sampled token: its age, and its logprob under the weights of its version.

    Args:
        samples_of: step -> its samples.
        weights: tensors of each policy version.
        oldest: greatest age, policy versions.

    Returns:
        the ages.
    """
    ages: set[int] = set()
    for step, samples in samples_of.items():
        for sample in samples:
            [turn] = sample.turns
            spans = turn.version_spans
            bounds = [0, *(span.stop for span in spans)]
            tiled = (
                [(span.start, span.stop) for span in spans] == list(pairwise(bounds)) == sorted(set(pairwise(bounds)))
            )
            where = f"step {step}, sample {sample.id}"
            assert tiled, f"{where}: {spans} leave gaps or overlap"
            assert bounds[-1] == turn.stop - turn.start, f"{where}: {spans} do not cover {turn.start} to {turn.stop}"
            versions = [span.version for span in spans]
            assert versions == sorted(set(versions)), f"{where}: versions do not rise: {versions}"
            ages |= {step - 1 - version for version in versions}
            assert not versions or 0 <= step - 1 - versions[-1] <= step - 1 - versions[0] <= oldest, (
                f"{where} has tokens of the versions {versions}, under version {step - 1}; {oldest} is allowed"
            )
            for span in spans:
                tensors = weights[span.version]
                start, stop = turn.start + span.start, turn.start + span.stop
                ids = torch.from_numpy(sample.token_ids[start - 1 : stop].copy())
                distribution = torch.log_softmax(bigram_logits(tensors[TRANSITION], tensors[UNIGRAM], ids[:-1]), -1)
                expected = distribution.gather(-1, ids[1:, None])[:, 0]
                found = torch.from_numpy(sample.token_data["generator_logprobs"][start:stop].copy())
                assert torch.allclose(found, expected, rtol=0, atol=1e-4), (
                    f"{where}: logprobs of tokens {start} to {stop} are not those of version {span.version}: "
                    f"{found.tolist()[:4]} instead of {expected.tolist()[:4]}"
                )
    return ages


def check_equal(found: Mapping[str, Any], expected: Mapping[str, Any], what: str, own: Collection[str] = ()) -> None:
    """Check that two results are equal, apart from metrics that only the first has.

    Args:
        what: names the second, for messages.
        own: further metrics that may differ: the mode's own.
    """
    for one, other in zip(found["metrics"], expected["metrics"], strict=True):
        names = other.keys() - own
        changed = {name: (one.get(name), other[name]) for name in sorted(names) if one.get(name) != other[name]}
        assert not changed, f"step {other['step']}: metrics differ from those of {what}: {changed}"
    assert found["rollouts"] == expected["rollouts"], f"other samples are trained on than by {what}"
    assert found["model"] == expected["model"], f"the weights differ from those of {what}"
    totals = {name: found["totals"].get(name) for name in expected["totals"]}
    assert totals == expected["totals"], f"totals are {totals}; those of {what} are {expected['totals']}"


class RolloutModeFixtures:
    """Base of ``RolloutModeConformance``."""

    @pytest.fixture(scope="class")
    @classmethod
    def stand(cls, tmp_path_factory: pytest.TempPathFactory) -> ModeStand:
        """Runs of the mode and of ``sync``."""
        suite: Any = cls
        folder = tmp_path_factory.mktemp("runs")
        content = {
            "weight_sync": {"backend": "fake"},
            "algorithm": {"name": "fake", "options": {"group_size": GROUP_SIZE}},
            "roles": {
                "trainer": {"kind": "trainer", "backend": "fake", "options": {"learning_rate": LEARNING_RATE}},
                "generator": {"kind": "generator", "backend": "fake", "replicas": 2},
                "reward": {"kind": "reward", "backend": "fake"},
            },
        }
        registry = registry_with(installed_plugins(), suite.record(), FAKE_WEIGHT_SYNC, *FAULTS)
        model = build_bigram_model(folder / "model")
        return ModeStand(suite, WholeRuns(folder, model, registry, content), tuple(suite.overrides))
