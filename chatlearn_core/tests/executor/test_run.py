"""A run goes on through what fails: a trainer that is lost goes back to the last checkpoint, and ends all the same."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chatlearn_algorithms.example_kinds import Demonstrations
from chatlearn_core.config.models import RunConfig
from chatlearn_core.data import Dataset, DatasetReport
from chatlearn_core.exceptions import (
    BackendError,
    BackendTimeoutError,
    CheckpointError,
    ConfigError,
    Interrupted,
    PluginError,
    TrainerLostError,
    WorkerPlace,
)
from chatlearn_core.executor.checkpoint import SEAL
from chatlearn_core.executor.learning_plan import learning_plan
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.executor.run import Run
from chatlearn_core.flow import trace
from chatlearn_core.metrics.durable_files import file_facts
from chatlearn_core.metrics.run_directory import FAILURE_PAGE
from chatlearn_core.plugins.observers import Observer, Observers
from chatlearn_core.plugins.records import RuntimeSpec
from chatlearn_core.protocols import Algorithm, ModelSource, PlainData, RoleUpdate, Unit
from chatlearn_core.runtime.plan import RolePlan
from chatlearn_core.types import (
    Demonstration,
    Derived,
    FileFacts,
    Metric,
    Metrics,
    OutputRequest,
    Prompt,
    RunFailure,
    SamplingParams,
    TrainBatch,
)
from chatlearn_data.options import ShuffledOptions
from chatlearn_data.shuffled_sampler import shuffled_sampler

STEPS = 5


class ReadingAlgorithm(Algorithm):
    """One update a step, from the demonstrations as they are."""

    input = "demonstrations"
    policy = "trainer"

    def flow(self, examples: Any, m: Any) -> Any:
        return examples

    def updates(self, step: int) -> list[RoleUpdate]:
        return [RoleUpdate("trainer", ReadingLoss())]


class ReadingLoss:
    unit: Unit = "sequence"
    needs = OutputRequest(frozenset({"logprobs"}))

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        return batch


TRAINER = RolePlan("trainer", "trainer", (), ModelSource("model", "model"), "lm", "cpu", 1, 1, True, {}, timeout_s=60.0)


class ListTrainer:
    """Its weights are the list of all batches that it was trained on; fails where the test says so."""

    name = "trainer"

    def __init__(self, runtime: ListRuntime) -> None:
        self.runtime = runtime
        self.weights: list[list[int]] = []

    async def update(self, batch: TrainBatch, loss: Any) -> Metrics:
        self.runtime.calls.append("update")
        number = self.runtime.calls.count("update")
        self.weights.append(batch.token_ids.tolist())
        if number in self.runtime.failures:
            raise self.runtime.failures[number]
        return {"loss": Metric(0.0, reducer="sum")}

    async def derive(self, batch: TrainBatch, function: Any, split: str) -> Derived:
        return Derived(function(batch).token_data)

    async def save(self, directory: Path) -> dict[str, FileFacts]:
        self.runtime.calls.append("save")
        directory.mkdir(parents=True)
        (directory / "weights.json").write_text(json.dumps(self.weights))
        return {}

    async def load(self, directory: Path) -> None:
        self.runtime.calls.append("load")
        self.weights = json.loads((directory / "weights.json").read_text())

    async def load_model(self, directory: Path, *, decay: float = 0.0) -> None:
        self.runtime.calls.append(f"load_model {directory}")
        self.weights = []

    async def export_model(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "weights.json").write_text(json.dumps(self.weights))


class ListRuntime:
    """Rebuilds its trainer as often as ``max_restarts`` says."""

    def __init__(self, failures: dict[int, Exception], max_restarts: int) -> None:
        self.failures = failures
        self.left = max_restarts
        self.calls: list[str] = []
        self.data = PlainData()
        self.current = ListTrainer(self)

    def devices(self) -> dict[str, Any]:
        return {}

    async def start(self, role_is_up: Any = None) -> None: ...

    async def close(self) -> None: ...

    def trainer(self, role: str) -> ListTrainer:
        return self.current

    async def recover(self, lost: TrainerLostError) -> None:
        if not self.left:
            raise lost
        self.left -= 1
        self.calls.append("recover")
        self.current = ListTrainer(self)


class Listener(RunListener):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.phases: list[str] = []

    def phase(self, step: int, phase: Phase) -> None:
        self.phases.append(str(phase))

    def message(self, text: str) -> None:
        self.said.append(text)

    def warning(self, text: str) -> None:
        self.said.append(text)


def demonstrations() -> Dataset:
    examples = tuple(Demonstration(Prompt(f"p{i}", np.array([i]), "?"), np.array([100 + i])) for i in range(7))
    report = DatasetReport("numbers", "numbers.jsonl", "sft", 7, 7, 0, 8, 1)
    return Dataset("numbers", 1.0, examples, report)


def make_run(
    run_dir: Path,
    runtime: ListRuntime,
    listener: RunListener,
    *,
    every: int,
    steps: int = STEPS,
    observers: Observers | None = None,
    **checkpoint: Any,
) -> Run:
    config = RunConfig.model_validate(
        {
            "output_dir": str(run_dir),
            "model": {"path": "none"},
            "data": {"train": [{"path": "numbers.jsonl"}]},
            "algorithm": {"name": "reading"},
            "roles": {"trainer": {"kind": "trainer", "backend": "list"}},
            "train": {"steps": steps, "prompts_per_step": 2},
            "checkpoint": {"every": every, "keep_last": 10} | checkpoint,
        }
    )
    dataset = demonstrations()
    spec = RuntimeSpec(name="list", factory="none:none", options="none:none")
    assembly = SimpleNamespace(
        config=config,
        loaded=SimpleNamespace(
            config=config,
            source="run.yaml",
            written={},
            resolved={},
            warnings=("run.yaml:3: odd",),
            chosen=lambda *path: SimpleNamespace(record=spec, options=None) if path == ("runtime",) else None,
        ),
        registry=SimpleNamespace(
            load_factory=lambda record: (
                shuffled_sampler if record.name == "shuffled" else lambda options, plan: runtime
            ),
            load_options=lambda record: ShuffledOptions,
            select=lambda kind, name, where: SimpleNamespace(name=name),
            entries=(),
        ),
        algorithm=ReadingAlgorithm(),
        learning=learning_plan(ReadingAlgorithm(), config.train, "reading"),
        policy="trainer",
        home="trainer",
        max_length=64,
        kind=Demonstrations(),
        graph=trace(lambda demos, m: demos, {"trainer": "trainer"}, name="reading", given="demonstrations"),
        evaluations=(),
        eval_reports=(),
        plan=SimpleNamespace(run_dir=run_dir, weight_syncs=(), roles={"trainer": TRAINER}, refreshes={}),
        train_set=SimpleNamespace(datasets=[dataset], reports=[dataset.report]),
        sampling=SamplingParams(1),
        group_rewards=frozenset(),
        cached_roles={},
    )
    return Run(assembly, listener=listener, observers=observers)  # type: ignore[arg-type]  # the part that is used


class Trained:
    """A run and what it left."""

    def __init__(self, run_dir: Path, failures: dict[int, Exception], max_restarts: int, **settings: Any) -> None:
        self.run_dir = run_dir
        self.runtime, self.listener = ListRuntime(failures, max_restarts), Listener()
        self.failures: list[RunFailure] = []
        observers = Observers([Observer("chatlearn_error", "pages 1", self._write_page, ("error", "failure"))])
        self.run = make_run(run_dir, self.runtime, self.listener, observers=observers, **settings)

    def _write_page(self, error: BaseException, failure: RunFailure) -> None:
        self.failures.append(failure)
        (failure.run_dir / FAILURE_PAGE).write_text(f"{type(error).__name__}: {error}", errors="backslashreplace")

    @property
    def failure(self) -> RunFailure:
        """What observers were given."""
        (failure,) = self.failures
        return failure

    @property
    def model(self) -> list[list[int]]:
        weights: list[list[int]] = json.loads((self.run_dir / "model" / "weights.json").read_text())
        return weights

    @property
    def steps(self) -> list[int]:
        return [record["step"] for record in self.lines("metrics.jsonl")]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").iterdir())

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / name).read_text().splitlines()]


Training = Callable[..., Trained]


@pytest.fixture
def training(tmp_path: Path) -> Training:
    """``training(name, failures)``: a run in a directory of that name, not started yet."""

    def make(
        name: str, failures: dict[int, Exception] | None = None, *, max_restarts: int = 5, every: int = 2, **more: Any
    ) -> Trained:
        return Trained(tmp_path / name, failures or {}, max_restarts, every=every, **more)

    return make


async def undisturbed(training: Training) -> list[list[int]]:
    trained = training("undisturbed")
    await trained.run.train()
    assert len(trained.model) == STEPS
    assert len({str(batch) for batch in trained.model}) == STEPS, (
        "every step sees other examples, or order says nothing"
    )
    return trained.model


def lost() -> TrainerLostError:
    return TrainerLostError("role 'trainer': rank 1 died")


async def test_a_run_trains_saves_and_exports(training: Training) -> None:
    trained = training("a")
    content = await trained.run.train()
    assert (content["status"], content["steps"]) == ("completed", STEPS)
    assert content["totals"]["samples/trained"] == 2 * STEPS
    assert trained.steps == [1, 2, 3, 4, 5]
    assert trained.checkpoints == ["step_00000002", "step_00000004", "step_00000005"]
    assert trained.runtime.calls == ["update", "update", "save", "update", "update", "save", "update", "save"]


async def test_warnings_of_the_configuration_are_told_and_written_down(training: Training) -> None:
    trained = training("a")
    await trained.run.train()
    assert trained.listener.said.count("run.yaml:3: odd") == 1
    assert '"warning": "run.yaml:3: odd"' in (trained.run_dir / "events.jsonl").read_text()


async def test_ranking_checkpoints_by_what_is_no_metric_is_told_once(training: Training) -> None:
    trained = training("a", keep_best=1, metric="sampels/trained")
    await trained.run.train()
    told = [text for text in trained.listener.said if "checkpoint.metric" in text]
    assert told == [
        "checkpoint.metric is 'sampels/trained', and this run has no such metric: checkpoint.keep_best keeps none. "
        "Did you mean 'samples/trained'? It is a name of metrics.jsonl"
    ]


async def test_ranking_by_an_accuracy_that_the_rewards_do_not_give_is_told_with_what_there_is(
    training: Training,
) -> None:
    trained = training("a", keep_best=1)
    trained.run.state.before = {"eval/reward": 0.5}
    await trained.run.train()
    [told] = [text for text in trained.listener.said if "checkpoint.metric" in text]
    assert told.endswith("the rewards of this run have no component accuracy: set checkpoint.metric to eval/reward")


@pytest.mark.parametrize("metric", ["samples/trained", "eval/accuracy"])
async def test_a_metric_that_is_there_or_may_come_is_not_warned_of(training: Training, metric: str) -> None:
    trained = training("a", keep_best=1, metric=metric)
    await trained.run.train()
    assert not [text for text in trained.listener.said if "checkpoint.metric" in text]


@pytest.mark.parametrize(
    ("failing", "redone"),
    [
        ((4,), "from step 2"),  # a step after the last checkpoint
        ((3,), "from step 2"),
        ((2,), "from the beginning"),  # before the first checkpoint
        ((4, 6), "from step 2"),  # twice from the same checkpoint
    ],
)
async def test_a_lost_trainer_goes_on_from_the_last_checkpoint(
    failing: Sequence[int], redone: str, training: Training
) -> None:
    expected = await undisturbed(training)
    trained = training("a", {number: lost() for number in failing})
    content = await trained.run.train()
    assert trained.model == expected, "the same examples in the same order, none twice"
    assert trained.steps == [1, 2, 3, 4, 5]
    assert content["totals"]["samples/trained"] == 2 * STEPS, "steps that were made again count once"
    told = [text for text in trained.listener.said if "rank 1 died" in text]
    assert len(told) == len(failing)
    assert all(f"The trainer was rebuilt; training continues {redone}" in text for text in told)
    events = [record for record in trained.lines("events.jsonl") if record["event"] == "trainer_lost"]
    assert len(events) == len(failing)
    assert trained.runtime.calls.count("load") == (0 if redone == "from the beginning" else len(failing))


async def test_a_trainer_lost_once_too_often_ends_the_run(training: Training) -> None:
    trained = training("a", {3: lost(), 4: lost()}, max_restarts=1)
    with pytest.raises(TrainerLostError, match="rank 1 died"):
        await trained.run.train()
    assert trained.lines("events.jsonl")[-1]["event"] == "error"
    assert "A checkpoint of step 2 is in" in trained.listener.said[-1]
    again = training("a")
    await again.run.train()
    assert again.model == await undisturbed(training), "it can be resumed"


async def test_a_run_that_fails_names_the_page_of_an_observer_which_goes_when_it_goes_on(training: Training) -> None:
    trained = training("a", {3: lost(), 4: lost()}, max_restarts=1)
    with pytest.raises(TrainerLostError):
        await trained.run.train()
    page = trained.run_dir / FAILURE_PAGE
    assert page.read_text() == "TrainerLostError: role 'trainer': rank 1 died"
    failure = trained.failure
    assert (failure.name, failure.phase, failure.step, failure.planned_steps) == ("run", "recovering", 3, 5)
    assert (failure.num_complete, failure.run_dir) == (2, trained.run_dir)
    assert "trainer_lost" in [event["event"] for event in failure.events]
    assert failure.kept.startswith("A checkpoint of step 2 is in")
    assert f"What happened, and how to continue: {page}" in trained.listener.said[-1]
    await training("a").run.train()
    assert not page.exists()


async def test_what_is_wrong_before_a_run_begins_leaves_no_page(training: Training) -> None:
    await training("a").run.train()
    again = training("a")
    with pytest.raises(ConfigError, match="is complete"):
        await again.run.train()
    assert not again.failures


async def test_a_run_without_a_page_names_none(training: Training) -> None:
    trained = training("a", {3: BackendError("out of memory")})
    trained.run.observers = Observers()
    with pytest.raises(BackendError, match="out of memory"):
        await trained.run.train()
    assert "What happened" not in trained.listener.said[-1]


async def test_an_observer_that_cannot_write_its_page_hides_no_error(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    trained = training("a", {3: BackendError("out of memory")})

    def full(**arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    trained.run.observers = Observers([Observer("chatlearn_error", "pages 1", full, ())], strict=True)
    with pytest.raises(BackendError, match="out of memory"):
        await trained.run.train()
    assert "chatlearn_error of pages 1 raised OSError: [Errno 28] No space left on device" in caplog.text
    summary = json.loads((trained.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert summary["error"] == "BackendError: out of memory"
    assert summary["planned_steps"] == trained.run.assembly.config.train.steps
    assert summary["totals"]["samples/total"] > 0
    assert {"python", "torch"} <= set(summary["versions"])


@pytest.mark.parametrize("kind", ["trainer", "generator", "reward", "environment"])
async def test_a_role_that_does_not_start_leaves_a_page(kind: str, training: Training) -> None:
    trained = training("a")

    async def start(role_is_up: Any = None) -> None:
        roles: dict[str, Any] = trained.run.assembly.config.roles
        roles["other"] = SimpleNamespace(kind=kind)
        raise BackendError("role 'other': no device").at(WorkerPlace("other", "worker 0", "setup"))

    trained.runtime.start = start  # type: ignore[method-assign]  # a machine without the device
    with pytest.raises(BackendError):
        await trained.run.train()
    assert (trained.failure.phase, trained.failure.step) == ("starting", 0)
    assert (trained.run_dir / FAILURE_PAGE).exists()


async def test_sys_exit_is_a_failure_and_no_interruption(training: Training) -> None:
    trained = training("a")

    async def start(role_is_up: Any = None) -> None:
        raise SystemExit(3)

    trained.runtime.start = start  # type: ignore[method-assign]  # what a plugin may do
    with pytest.raises(PluginError, match=r"(?s)tried to end the process: SystemExit\(3\).*test_run\.py, line"):
        await trained.run.train()
    assert "SystemExit(3)" in (trained.run_dir / FAILURE_PAGE).read_text()


async def test_a_trainer_lost_while_it_saves_or_exports_saves_or_exports_again(training: Training) -> None:
    expected = await undisturbed(training)
    for method, phase in (("save", "saving"), ("export_model", "exporting")):
        trained = training(method)
        original = getattr(ListTrainer, method)
        told: list[str] = []

        async def failing(
            self: ListTrainer, directory: Path, original: Any = original, told: list[str] = told, phase: str = phase
        ) -> Any:
            answer = await original(self, directory)
            if not told:
                told.append(phase)
                raise lost()
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ListTrainer, method, failing)
            await trained.run.train()
        assert told == [phase]
        assert trained.model == expected
        assert trained.steps == [1, 2, 3, 4, 5]
        assert not [name for name in trained.checkpoints if name.startswith(".")], "nothing unfinished"


async def test_a_rank_lost_while_the_run_goes_back_is_another_loss(training: Training) -> None:
    expected = await undisturbed(training)
    trained = training("a", {4: lost()}, max_restarts=2)
    load = ListTrainer.load
    told: list[int] = []

    async def failing(self: ListTrainer, directory: Path) -> None:
        told.append(1)
        if len(told) == 1:
            raise lost()
        await load(self, directory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ListTrainer, "load", failing)
        await trained.run.train()
    assert trained.runtime.calls.count("recover") == 2
    assert trained.model == expected


async def test_phases_come_in_their_order(training: Training) -> None:
    trained = training("a", {4: lost()}, steps=4)
    await trained.run.train()
    step = ["updating", "syncing"]
    assert trained.listener.phases == [
        *("starting", "syncing", *step, *step, "saving", *step),
        *("updating", "recovering", "restoring", "syncing", *step, *step, "saving", "exporting", "closing"),
    ]


async def test_a_damaged_checkpoint_is_passed_over_in_recovery(training: Training) -> None:
    expected = await undisturbed(training)
    trained = training("a", {5: lost()})
    weights = trained.run_dir / "checkpoints" / "step_00000004" / "roles" / "trainer" / "weights.json"
    update = trained.runtime.current.update

    async def damaging(batch: TrainBatch, loss: Any) -> Metrics:
        if weights.exists():
            weights.write_text("[]")
        return await update(batch, loss)

    trained.runtime.current.update = damaging  # type: ignore[method-assign]  # as a disk would
    await trained.run.train()
    assert trained.model == expected
    [told] = [text for text in trained.listener.said if "rank 1 died" in text]
    assert "training continues from step 2" in told
    assert told.count("step_00000004 is damaged") == 1


async def test_a_checkpoint_of_another_directory_is_what_recovery_goes_back_to(training: Training) -> None:
    expected = await undisturbed(training)
    first = training("first")
    await first.run.train()
    second = training("second", {1: lost()}, every=0)
    await second.run.train(first.run_dir / "checkpoints" / "step_00000002")
    assert second.model == expected
    assert second.steps == [3, 4, 5]


async def test_recovery_forgets_what_the_lost_steps_said(training: Training) -> None:
    trained = training("a", {4: lost()})
    seen: list[dict[str, float]] = []
    recover = trained.runtime.recover

    async def watched(error: TrainerLostError) -> None:
        trained.run.state.alarms.mismatch({"mismatch/kl": 0.5})  # of the lost step
        seen.append(trained.run.state.line)
        await recover(error)

    load = ListTrainer.load

    async def checked(self: ListTrainer, directory: Path) -> None:
        [line] = seen
        assert line, "step 3 had a line"
        assert trained.run.state.alarms.state_dict()["earlier"] == {}
        assert trained.run.state.line == {}
        await load(self, directory)

    trained.runtime.recover = watched  # type: ignore[method-assign]  # looks on
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ListTrainer, "load", checked)
        await trained.run.train()
    assert len(seen) == 1


async def test_going_on_from_an_older_checkpoint_says_what_it_removes(training: Training) -> None:
    first = training("a")
    await first.run.train()
    expected = first.model
    again = training("a")
    await again.run.train(first.run_dir / "checkpoints" / "step_00000002", rewind=True)
    text = "removing checkpoints newer than step 2, of step 4, 5, and metrics and rollouts of steps 3 to 5"
    assert text in again.listener.said
    [event] = [record for record in again.lines("events.jsonl") if record["event"] == "removed"]
    assert event.pop("time")
    assert event == {"event": "removed", "step": 2, "checkpoints": [4, 5], "metrics": [3, 4, 5]}
    assert again.model == expected
    assert (first.run_dir / "checkpoints" / "step_00000005" / SEAL).exists(), "made again"


def files_of(directory: Path) -> dict[str, bytes]:
    """All that a run left, without what it says of itself."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


async def test_nothing_newer_is_deleted_unasked(training: Training) -> None:
    first = training("a")
    await first.run.train()
    before = files_of(first.run_dir)
    older = first.run_dir / "checkpoints" / "step_00000002"
    for resume in (older, Path("step_2")):
        with pytest.raises(CheckpointError, match=r"has checkpoints of steps 4, 5, newer than .* \(step 2\)") as caught:
            await training("a").run.train(resume, command="chatlearn run 'a b.yaml'")
        assert "\n  chatlearn run 'a b.yaml'\n" in str(caught.value)
        assert f"\n  chatlearn run 'a b.yaml' --resume {resume} --rewind\n" in str(caught.value)
        assert files_of(first.run_dir) == before
    branch = training("b")
    await branch.run.train(older)
    assert branch.model == first.model
    assert files_of(first.run_dir) == before


async def test_a_checkpoint_of_another_run_is_not_mixed_into_a_directory_that_holds_one(training: Training) -> None:
    first, other = training("a"), training("b", every=0)
    await first.run.train()
    await other.run.train()
    before = files_of(other.run_dir)
    foreign = first.run_dir / "checkpoints" / "step_00000002"
    for rewind in (False, True):
        with pytest.raises(CheckpointError, match="holds a run that did not start from it"):
            await training("b", every=0).run.train(foreign, rewind=rewind)
        assert files_of(other.run_dir) == before


async def test_a_branch_that_was_stopped_before_its_first_checkpoint_begins_again(training: Training) -> None:
    first = training("a")
    await first.run.train()
    older = first.run_dir / "checkpoints" / "step_00000002"
    await training("b", every=0).run.train(older)
    branch = first.run_dir.parent / "b"
    (branch / "summary.json").unlink()  # as if it had been killed before its first checkpoint
    shutil.rmtree(branch / "checkpoints")
    again = training("b", every=0)
    await again.run.train(older)
    assert again.model == first.model
    assert again.steps == [3, 4, 5]


async def test_a_damaged_checkpoint_is_put_aside(training: Training) -> None:
    first = training("a")
    await first.run.train()
    expected = first.model
    damaged = first.run_dir / "checkpoints" / "step_00000005" / "roles" / "trainer" / "weights.json"
    damaged.write_text("[]")
    (first.run_dir / "model").rename(first.run_dir / "elsewhere")
    again = training("a")
    await again.run.train()
    assert again.model == expected
    aside = first.run_dir / "checkpoints" / "damaged_step_00000005"
    assert (aside / "roles" / "trainer" / "weights.json").read_text() == "[]"
    assert [text for text in again.listener.said if f"is now {aside}" in text]


async def test_a_run_does_not_start_over_because_its_storage_fails(training: Training) -> None:
    first = training("a")
    await first.run.train()
    for seal in first.run_dir.rglob(SEAL):
        seal.write_text("{")
    before = files_of(first.run_dir)
    with pytest.raises(CheckpointError, match=r"none of them can be read:\n(.*\n)+.*chatlearn run run\.yaml --rewind"):
        await training("a").run.train()
    assert files_of(first.run_dir) == before
    again = training("a")
    await again.run.train(rewind=True)
    assert again.model == first.model
    assert again.steps == [1, 2, 3, 4, 5]


async def test_broken_lines_are_told_and_what_a_killed_run_left_is_removed(training: Training) -> None:
    with pytest.raises(BackendError):
        await training("a", {4: BackendError("out of memory")}).run.train()
    again = training("a")
    for name in ("metrics.jsonl", "trace.jsonl"):
        with (again.run_dir / name).open("a") as stream:
            stream.write('{"step": 3, "trai')
    (again.run_dir / ".failure.md.tmp").write_text("half")
    (again.run_dir / "checkpoints" / ".removing_step_00000001").mkdir()
    await again.run.train()
    assert again.steps == [1, 2, 3, 4, 5]
    said = [text for text in again.listener.said if "had broken lines, which were removed" in text]
    assert [text.partition(" ")[0] for text in said] == [
        str(again.run_dir / name) for name in ("metrics.jsonl", "trace.jsonl")
    ]
    assert [path.name for path in again.run_dir.rglob(".*")] == [".lock"]


async def test_nothing_is_said_where_no_checkpoint_is_removed(training: Training) -> None:
    with pytest.raises(BackendError):
        await training("a", {4: BackendError("out of memory")}).run.train()
    again = training("a")
    await again.run.train()
    assert not [text for text in again.listener.said if text.startswith("removing")]


async def test_nothing_is_saved_behind_a_call_that_hangs(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = training("a", every=0)

    def hang(*arguments: Any) -> None:
        if hung.run.state.step == 2:
            raise BackendTimeoutError("role 'trainer': compute did not return within 60 s")

    monkeypatch.setattr(type(hung.run.observers), "rollout_end", lambda self, *arguments: hang(*arguments))
    with pytest.raises(BackendTimeoutError):
        await hung.run.train()
    assert "save" not in hung.runtime.calls
    assert "Step 2 could not be saved, since a call still hangs. There is no checkpoint" in hung.listener.said[-1]


async def test_the_last_step_is_saved_when_something_else_fails(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await undisturbed(training)
    failing = training("a", every=0)

    def bad_rollout(*arguments: Any) -> None:
        if failing.run.state.step == 2:
            raise BackendError("every generation failed")

    monkeypatch.setattr(type(failing.run.observers), "rollout_end", lambda self, *arguments: bad_rollout(*arguments))
    with pytest.raises(BackendError):
        await failing.run.train()
    assert failing.checkpoints == ["step_00000002"]
    monkeypatch.undo()
    again = training("a")
    await again.run.train()
    assert again.model == expected


async def test_an_error_in_any_words_ends_a_run_as_every_error_does(training: Training) -> None:
    words = "\x1b[31mhalf \ud800 \u2028 of a pair"
    failed = training("a", {3: BackendError(words)})
    with pytest.raises(BackendError):
        await failed.run.train()
    assert words in failed.lines("events.jsonl")[-1]["error"]
    assert words in json.loads((failed.run_dir / "summary.json").read_text())["error"]
    again = training("a")
    await again.run.train()
    assert again.steps == [1, 2, 3, 4, 5]


class CopyingTrainer(ListTrainer):
    """Copies its weights at ``begin_save``, and writes the copy when the test lets it."""

    copy: tuple[Path, str] | None = None

    async def update(self, batch: TrainBatch, loss: Any) -> Metrics:
        metrics = await super().update(batch, loss)
        self.runtime.after_update(self.runtime.calls.count("update"))
        return metrics

    async def begin_save(self, directory: Path) -> bool:
        assert self.copy is None, "one in flight at most"
        self.runtime.calls.append("begin")
        self.copy = directory, json.dumps(self.weights)
        return True

    async def finish_save(self) -> dict[str, FileFacts]:
        await self.runtime.may_write.wait()
        assert self.copy is not None
        (directory, content), self.copy = self.copy, None
        if self.runtime.current is not self:
            raise lost()
        if self.runtime.write_failure is not None:
            raise self.runtime.write_failure
        directory.mkdir(parents=True)
        (directory / "weights.json").write_text(content)
        self.runtime.calls.append("finish")
        return file_facts(directory, ["weights.json"])


class CopyingRuntime(ListRuntime):
    write_failure: Exception | None = None

    def __init__(self, failures: dict[int, Exception], max_restarts: int) -> None:
        super().__init__(failures, max_restarts)
        self.may_write = asyncio.Event()
        self.after_update: Callable[[int], None] = lambda number: None
        self.current = CopyingTrainer(self)

    async def recover(self, lost: TrainerLostError) -> None:
        await super().recover(lost)
        self.current = CopyingTrainer(self)
        self.may_write.set()


@pytest.fixture
def copying(training: Training, monkeypatch: pytest.MonkeyPatch) -> Training:
    """Runs whose trainer writes checkpoints in the background."""
    monkeypatch.setattr(sys.modules[__name__], "ListRuntime", CopyingRuntime)
    return partial(training, background=True)


async def test_training_goes_on_while_a_checkpoint_is_written(copying: Training, training: Training) -> None:
    trained = copying("a")
    trained.runtime.after_update = lambda number: trained.runtime.may_write.set() if number == 4 else None
    await trained.run.train()
    calls = trained.runtime.calls
    assert calls[:7] == ["update", "update", "begin", "update", "update", "finish", "begin"]
    assert sorted(calls[7:9]) == ["finish", "update"]
    assert calls[9:] == ["save"], "the last step's is waited for"
    assert trained.checkpoints == ["step_00000002", "step_00000004", "step_00000005"]
    saved = json.loads((trained.run_dir / "checkpoints/step_00000002/roles/trainer/weights.json").read_text())
    assert saved == trained.model[:2], "as it was when the step was complete"
    for step in (4, 5):
        shutil.rmtree(trained.run_dir / "checkpoints" / f"step_{step:08d}")
    again = training("a")
    await again.run.train()
    assert again.model == trained.model


async def test_an_error_of_the_writer_is_raised_at_the_next_step(copying: Training) -> None:
    trained = copying("a")
    trained.runtime.may_write.set()
    trained.runtime.write_failure = BackendError("no space left")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint of step 2 .* no space left"):
        await trained.run.train()
    assert trained.runtime.calls.count("update") <= 3
    assert trained.checkpoints == [f"step_{trained.runtime.calls.count('update'):08d}"], "that step is saved once more"


async def test_a_run_killed_while_it_writes_goes_on_from_the_checkpoint_before(
    copying: Training, training: Training
) -> None:
    killed = copying("a", every=1)
    killed.runtime.may_write.set()

    def after_update(number: int) -> None:
        if number == 2:
            killed.runtime.may_write.clear()
        elif number == 3:  # what is on disk now is what a kill would leave
            shutil.copytree(killed.run_dir, killed.run_dir.with_name("b"))
            killed.runtime.may_write.set()

    killed.runtime.after_update = after_update
    await killed.run.train()
    left = training("b")
    assert left.checkpoints == [".writing_step_00000002", "step_00000001"]
    await left.run.train()
    assert left.model == killed.model
    assert not [name for name in left.checkpoints if name.startswith(".")]


async def test_a_trainer_lost_while_it_writes_goes_back_to_the_checkpoint_before(
    copying: Training, training: Training
) -> None:
    expected = await undisturbed(training)
    trained = copying("a", {4: lost()})
    await trained.run.train()
    assert trained.model == expected
    assert trained.steps == [1, 2, 3, 4, 5]
    assert not [name for name in trained.checkpoints if name.startswith(".")]
    assert "training continues from the beginning" in " ".join(trained.listener.said)


async def test_a_run_interrupted_while_it_writes_completes_that_checkpoint_and_saves_its_last_step(
    copying: Training,
) -> None:
    trained = copying("a")
    running = asyncio.create_task(trained.run.train())

    def after_update(number: int) -> None:
        if number == 3:
            running.cancel()
            asyncio.get_running_loop().call_later(0.1, trained.runtime.may_write.set)

    trained.runtime.after_update = after_update
    with pytest.raises(Interrupted):
        await running
    assert trained.runtime.calls == ["update", "update", "begin", "update", "update", "finish", "save"]
    assert trained.checkpoints == ["step_00000002", "step_00000004"], "step 4 was waiting for the writer of step 2"
