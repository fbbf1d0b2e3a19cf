"""The loop: what a step takes, what waits or is left out, which version everything is of, and how it goes on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chatlearn_core.batching import sample_packer
from chatlearn_core.config.models import RunConfig
from chatlearn_core.data import Dataset, DatasetReport, Prompts
from chatlearn_core.exceptions import BackendError
from chatlearn_core.executor.learning_plan import learning_plan
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.executor.run import Run
from chatlearn_core.executor.sample_metrics import DISCARDED
from chatlearn_core.executor.step_samples import num_sampled_tokens
from chatlearn_core.flow import trace
from chatlearn_core.plugins.observers import Observer, Observers
from chatlearn_core.plugins.records import RuntimeSpec
from chatlearn_core.protocols import Algorithm, PlainData, RoleUpdate, Unit
from chatlearn_core.types import (
    Completion,
    Derived,
    GenerateRequest,
    Metric,
    Metrics,
    OutputRequest,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    SyncReceipt,
    TrainBatch,
    VersionSpan,
    end_to_end,
)
from chatlearn_data.options import ShuffledOptions
from chatlearn_data.shuffled_sampler import shuffled_sampler

ROLES = {"learner": "trainer", "sampler": "generator", "judge": "reward"}
SAMPLING = SamplingParams(4)
EPOCHS = 2


class Loss:
    unit: Unit = "sequence"
    needs = OutputRequest(frozenset({"logprobs"}))

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        return batch


class WantsSpread(Algorithm):
    """Trains on groups whose rewards differ and wants ``target`` of them, drawing ``overdraw`` examples for each that
    is missing; rests in the steps of ``rests``. Its state counts steps.
    """

    policy = "learner"
    group_size = 2

    def __init__(self, target: int = 0, overdraw: int = 1, rests: Sequence[int] = ()) -> None:
        self.target, self.overdraw, self.rests = target, overdraw, rests
        self.seen: list[int] = []

    def flow(self, prompts: Any, m: Any) -> Any:
        samples = m.sampler.generate(prompts)
        return m.join(samples, m.judge.score(samples), m.learner.logprobs(samples))

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        reward = dict(zip(batch.sample_ids, batch.sequence_data["reward"].tolist(), strict=True))
        equal = [name for name in reward if reward[name] == reward[f"{name[:-1]}{1 - int(name[-1])}"]]
        return Derived(exclusions=dict.fromkeys(equal, "zero_spread"))

    def updates(self, step: int) -> list[RoleUpdate]:
        return [] if step in self.rests else [RoleUpdate("learner", Loss())]

    def wanted(self, samples: Sequence[Sample]) -> int:
        values: dict[str, set[float | None]] = {}
        for sample in samples:
            assert sample.reward is not None, "rollouts are finished"
            values.setdefault(sample.group_id, set()).add(sample.reward.value)
        missing = self.target - sum(len(found) > 1 for found in values.values())
        return max(0, missing) * self.overdraw

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        assert metrics["samples/total"] > 0
        self.seen.append(step)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Engines:
    """All roles at once. Groups of every third prompt (p0, p3, ...) have different rewards."""

    num_replicas = 1
    accepting = frozenset({0})
    name = "engines"

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.data = PlainData()
        self.version = -1
        self.computed: list[tuple[str, ...]] = []
        self.updates: list[tuple[str, ...]] = []
        self.synced: list[int] = []
        self.held: list[int] = []
        """Numbers of updates before rebuilds were held."""
        self.released: list[tuple[int, int]] = []
        """Numbers of updates before they were released, and the version."""

    def trainer(self, role: str) -> Engines:
        return self

    generator = reward = trainer

    def devices(self) -> dict[str, Any]:
        return {}

    async def start(self, role_is_up: Any = None) -> None: ...

    async def close(self) -> None: ...

    async def generate(self, request: GenerateRequest, replica: int | None = None, on_tokens: Any = None) -> Completion:
        count = 1 + request.sampling.seed % 4
        return Completion(
            request_id=request.id,
            token_ids=np.arange(count),
            logprobs=np.full(count, -1.0 - self.version, np.float32),
            basis=request.sampling.basis,
            finish_reason="stop",
            sampling=request.sampling,
            version_spans=(VersionSpan(0, count, self.version),),
        )

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        spread = [int(sample.example_id[1:]) % 3 == 0 for sample in samples]
        return [RewardResult(float(int(s.id[-1]) if d else 0)) for s, d in zip(samples, spread, strict=True)]

    async def compute(self, batch: TrainBatch, request: OutputRequest) -> dict[str, Any]:
        import torch

        self.computed.append(batch.sample_ids)
        return {"logprobs": torch.where(batch.loss_mask, -1.0 - self.version, 0.0).float()}

    async def derive(self, batch: TrainBatch, function: Any, split: str = "group") -> Derived:
        derived: Derived = function(batch)
        return derived

    async def update(self, batch: TrainBatch, loss: Any) -> Metrics:
        if len(self.updates) == self.fail_at:
            raise BackendError("the learner is out of memory")
        self.updates.append(batch.sample_ids)
        return {"loss": Metric(0.0, reducer="sum")}

    async def hold_rebuilds(self) -> None:
        self.held.append(len(self.updates))

    async def release_rebuilds(self, policy_version: int) -> None:
        self.released.append((len(self.updates), policy_version))

    async def sync_weights(self, trainer: str, generator: str, version: int) -> list[SyncReceipt]:
        self.version = version
        self.synced.append(version)
        return [SyncReceipt(0, version, "serving")]

    async def save(self, directory: Path) -> dict[str, Any]:
        directory.mkdir(parents=True)
        (directory / "updates.json").write_text(json.dumps(self.updates))
        return {}

    async def load(self, directory: Path) -> None:
        self.updates = [tuple(ids) for ids in json.loads((directory / "updates.json").read_text())]

    async def export_model(self, directory: Path) -> None:
        directory.mkdir()


class Said(RunListener):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


class Looped:
    """A run over twelve prompts, two a step unless the algorithm wants more, and what it left."""

    def __init__(self, run_dir: Path, algorithm: WantsSpread, fail_at: int | None, rollout: Any, steps: int) -> None:
        self.run_dir, self.algorithm = run_dir, algorithm
        self.engines, self.said = Engines(fail_at), Said()
        self.taken: list[Sample] = []
        config = RunConfig.model_validate(
            {
                "output_dir": str(run_dir),
                "model": {"path": "none"},
                "data": {"train": [{"path": "numbers.jsonl"}], "shuffle": False},
                "algorithm": {"name": "spread"},
                "roles": {name: {"kind": kind, "backend": "fake"} for name, kind in ROLES.items()},
                "rollout": rollout,
                "train": {"steps": steps, "prompts_per_step": 2, "epochs": EPOCHS},
                "checkpoint": {"every": 1, "keep_last": 20},
            }
        )
        prompts = tuple(Prompt(f"p{i}", np.array([i, 1]), "?") for i in range(12))
        report = DatasetReport("numbers", "numbers.jsonl", "rl", 12, 12, 0, 2, 2)
        dataset = Dataset("numbers", 1.0, prompts, report)
        spec = RuntimeSpec(name="fake", factory="none:none", options="none:none")
        plugin = {("runtime",): SimpleNamespace(record=spec, options=None)}
        routes = (SimpleNamespace(trainer="learner", target="sampler", record=spec, why="", channel=""),)
        assembly = SimpleNamespace(
            max_length=64,
            config=config,
            loaded=SimpleNamespace(
                config=config,
                source="run.yaml",
                written={},
                resolved={},
                warnings=(),
                chosen=lambda *at: plugin.get(at),
            ),
            registry=SimpleNamespace(
                load_factory=lambda record: (
                    shuffled_sampler if record.name == "shuffled" else lambda options, plan: self.engines
                ),
                load_options=lambda record: ShuffledOptions,
                select=lambda kind, name, where: SimpleNamespace(name=name),
                entries=(),
            ),
            algorithm=algorithm,
            learning=learning_plan(algorithm, config.train, "spread"),
            policy="learner",
            home="learner",
            kind=Prompts(),
            graph=trace(algorithm.flow, ROLES, name="spread"),
            evaluations=(),
            eval_reports=(),
            plan=SimpleNamespace(run_dir=run_dir, weight_syncs=routes, roles={}, refreshes={}),
            cached_roles={},
            train_set=[*prompts],
            sampling=SAMPLING,
            group_rewards=frozenset(),
        )
        assembly.train_set = _Examples(dataset)
        observer = Observer("chatlearn_rollout_end", "test 1", self._keep, ("step", "samples"))
        self.run = Run(assembly, listener=self.said, observers=Observers([observer]))  # type: ignore[arg-type]  # the part that is used

    def _keep(self, step: int, samples: Sequence[Sample]) -> None:
        self.taken += samples

    @property
    def lines(self) -> list[dict[str, float]]:
        """Of all steps, without times."""
        records = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return [
            {k: v for k, v in r.items() if not k.startswith(("time", "timing", "perf/throughput"))} for r in records
        ]

    def checkpoint(self, step: int) -> dict[str, Any]:
        seal = self.run_dir / "checkpoints" / f"step_{step:08d}" / "checkpoint.json"
        state: dict[str, Any] = json.loads(seal.read_text())["state"]
        return state


class _Examples:
    def __init__(self, dataset: Dataset) -> None:
        self.datasets, self.reports = [dataset], [dataset.report]

    def __iter__(self) -> Any:
        return iter(self.datasets[0].examples)


Loop = Callable[..., Looped]


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    """``loop(algorithm)``: a run in a directory of its name, not started yet."""

    def make(
        algorithm: WantsSpread, *, name: str = "run", fail_at: int | None = None, steps: int = 4, **rollout: Any
    ) -> Looped:
        return Looped(tmp_path / name, algorithm, fail_at, rollout, steps)

    return make


def trained(looped: Looped) -> Counter[str]:
    """How often each sample was trained on."""
    return Counter(sample_id for ids in looped.engines.updates for sample_id in ids)


async def test_a_step_takes_the_prompts_of_a_step(loop: Loop) -> None:
    looped = loop(WantsSpread())
    await looped.run.train()
    assert [line["samples/total"] for line in looped.lines] == [4] * 4
    assert not any("rollout/refills" in line or "rollout/buffered" in line for line in looped.lines)
    assert looped.engines.computed == [ids for ids in looped.engines.computed if len(ids) == 4]
    assert [line.get("rollout/staleness_max", 0) for line in looped.lines] == [0] * 4


async def test_a_step_packs_each_array_of_its_samples_once(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: Counter[int] = Counter()

    def counted(arrays: Sequence[Any]) -> Any:
        joined.update(id(array) for array in arrays)
        kept.extend(arrays)
        return end_to_end(arrays)

    kept: list[Any] = []  # so that no two arrays have one id
    monkeypatch.setattr(sample_packer, "end_to_end", counted)
    looped = loop(WantsSpread(), steps=2)
    await looped.run.train()
    assert [line["samples/excluded"] for line in looped.lines] == [2, 2], "advantages and updates take fewer samples"
    assert set(joined.values()) == {1}
    fields = ("token_ids", "loss_mask", "generator_logprobs", "policy_version")
    assert len(joined) == 2 * 4 * len(fields), "steps, samples; the learner returns its logprobs packed"


async def test_a_step_is_refilled_until_the_algorithm_has_enough(loop: Loop) -> None:
    looped = loop(WantsSpread(target=2), steps=2)
    await looped.run.train()
    assert [line["samples/trained"] for line in looped.lines] == [4, 4], "two groups with spread"
    assert [line["samples/total"] for line in looped.lines] == [8, 12], "p0 to p3; p4 to p9"
    assert [line["rollout/refills"] for line in looped.lines] == [2, 3], "one and one; two, one and one"
    assert all("excluded" in text for text in looped.said.warnings), "and nothing else is said"


async def test_refills_have_a_bound_and_reaching_it_is_said(loop: Loop) -> None:
    looped = loop(WantsSpread(target=9), steps=1, max_refills=1)
    await looped.run.train()
    assert looped.lines[0]["rollout/refills"] == 1
    assert looped.lines[0]["samples/total"] == 2 * (2 + 8), "a step of two, and the eight that were missing then"
    [said] = [text for text in looped.said.warnings if "max_refills" in text]
    assert said == (
        "after 1 refills (rollout.max_refills) algorithm 'spread' would draw 5 more prompts; "
        "the step trains on those of its 10 groups that are not excluded"
    )


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_what_a_step_does_not_take_waits_or_is_too_old(max_staleness: int, loop: Loop) -> None:
    looped = loop(WantsSpread(target=2, overdraw=6), max_staleness=max_staleness)
    await looped.run.train()
    first, second = looped.lines[:2]
    assert (first["samples/total"], first["rollout/buffered"]) == (8, 8), "p0 to p3 are taken, p4 to p7 are not"
    if max_staleness:
        assert second["rollout/staleness_max"] == 1
        [old] = [s for s in looped.taken if s.id == "p6@0#0"]
        assert old.token_data["generator_logprobs"][-1] == -1.0, "the first weights sampled it"
        assert old.token_data["learner_logprobs"][-1] == -2.0, "logprobs are of the weights that the updates begin with"
        assert "rollout/discarded_tokens/stale" not in second
    else:
        assert second["rollout/staleness_max"] == 0
        assert second["samples/excluded/stale"] == 8
        assert second["rollout/discarded_tokens/stale"] > 0


@pytest.mark.parametrize("max_staleness", [0, 1, 5])
async def test_every_admitted_sample_is_trained_as_planned_or_excluded_with_a_reason(
    max_staleness: int, loop: Loop
) -> None:
    looped = loop(WantsSpread(target=2, overdraw=6), max_staleness=max_staleness, steps=6)
    summary = await looped.run.train()
    counts = trained(looped)
    assert set(counts.values()) == {EPOCHS}
    taken = {sample.id: sample.exclusion for sample in looped.taken}
    assert len(taken) == len(looped.taken), "no sample twice"
    assert {name for name, reason in taken.items() if reason is None} == set(counts)
    totals, left = summary["totals"], looped.lines[-1].get("rollout/buffered", 0)
    assert totals["samples/trained"] == len(counts)
    assert totals["samples/admitted"] == totals["samples/trained"] + totals["samples/excluded"] + left
    reasons = Counter[str]()
    for line in looped.lines:
        reasons.update({k.rpartition("/")[2]: int(v) for k, v in line.items() if k.startswith("samples/excluded/")})
    assert reasons.total() == totals["samples/excluded"]
    assert reasons["zero_spread"] == sum(reason == "zero_spread" for reason in taken.values())
    assert bool(reasons["stale"]) == (max_staleness == 0)
    discarded = Counter[str]()
    for line in looped.lines:
        discarded.update({k.rpartition("/")[2]: int(v) for k, v in line.items() if k.startswith(f"{DISCARDED}/")})
    assert discarded.total() == totals[DISCARDED] == sum(line.get(DISCARDED, 0) for line in looped.lines)
    assert discarded["zero_spread"] == num_sampled_tokens([one for one in looped.taken if one.exclusion is not None])
    assert discarded.keys() == reasons.keys()
    assert (looped.lines[-1].get("rollout/buffered_tokens", 0) > 0) == (left > 0)


async def test_the_policy_version_counts_syncs_and_not_steps(loop: Loop) -> None:
    """The policy rests in the second step: its weights stay, and nothing is synced."""
    looped = loop(WantsSpread(rests=[2]))
    await looped.run.train()
    engines = looped.engines
    assert engines.synced == [0, 1, 2, 3]
    assert [version for _, version in engines.released] == [1, 2, 3]
    assert engines.held == [0, *(count for count, _ in engines.released[:-1])], "around all updates of a step"
    assert engines.released[-1][0] == len(engines.updates) > 0
    assert [looped.checkpoint(step)["policy_version"] for step in (1, 2, 3, 4)] == [1, 1, 2, 3]
    assert [line.get("rollout/staleness_max", 0) for line in looped.lines] == [0] * 4


@pytest.mark.parametrize("fail_at", [0, 3, 5, 6])
async def test_a_run_that_failed_goes_on_with_what_waited(fail_at: int, loop: Loop) -> None:
    settings: dict[str, Any] = {"max_staleness": 1, "steps": 6}
    undisturbed = loop(WantsSpread(2, 6), name="undisturbed", **settings)
    await undisturbed.run.train()
    assert max(line["rollout/staleness_max"] for line in undisturbed.lines) == 1
    failed = loop(WantsSpread(2, 6), fail_at=fail_at, **settings)
    with pytest.raises(BackendError, match="out of memory"):
        await failed.run.train()
    resumed = loop(WantsSpread(2, 6), **settings)
    await resumed.run.train()
    assert resumed.engines.updates == undisturbed.engines.updates
    assert resumed.lines == undisturbed.lines
    assert resumed.algorithm.seen == [1, 2, 3, 4, 5, 6]
    assert resumed.checkpoint(6)["algorithm"] == {"seen": [1, 2, 3, 4, 5, 6]}


async def test_the_state_of_the_algorithm_is_in_checkpoints(loop: Loop) -> None:
    await loop(WantsSpread(), steps=2).run.train()
    longer = loop(WantsSpread(), steps=3)
    await longer.run.train()
    assert longer.algorithm.seen == [1, 2, 3]
