"""Whole flows: named calls, self-play, functions of the user's, further turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, FlowError
from chatlearn_core.executor.rollout_producer import make_requests
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.flow import trace
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import PlainData
from chatlearn_core.types import (
    Completion,
    ExampleDraw,
    GenerateRequest,
    OutputRequest,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    TrainBatch,
    VersionSpan,
    pack_samples,
)

ROLES = {
    "generator": "generator",
    "rival": "generator",
    "reward": "reward",
    "style": "reward",
    "trainer": "trainer",
    "teacher": "trainer",
}
SAMPLING = SamplingParams(max_tokens=2, temperature=0.5)
FUNCTIONS = """
import asyncio
import threading
from dataclasses import replace

import numpy as np

THREADS = []


def best_of(samples, keep=1):
    THREADS.append(threading.current_thread().name)
    ranked = sorted(samples, key=lambda sample: sample.reward.value, reverse=True)
    return ranked[:keep]


async def best_of_async(samples, keep=1):
    await asyncio.sleep(0)
    return best_of(samples, keep)


def answer_back(samples):
    return [replace(sample, token_ids=np.concatenate([sample.token_ids, [50, 51]])) for sample in samples]


def bonus(samples, by):
    for sample in samples:
        sample.sequence_data["bonus"] = by * len(sample.token_ids)
    return samples


def fails(samples):
    raise KeyError("difficulty")


async def fails_async(samples):
    raise KeyError("difficulty")


def writes_in_place(samples):
    samples[0].token_ids[0] = 7
    return samples


def hangs(samples):
    threading.Event().wait(5)


def forgets_to_return(samples):
    pass


def returns_numbers(samples):
    return [1.0 for _ in samples]


def returns_twice(samples):
    return [samples[0], samples[0]]


def changes_tokens(samples):
    return [replace(samples[0], token_ids=samples[0].token_ids[::-1].copy())]


def trains_on_what_it_wrote(samples):
    tokens = np.concatenate([samples[0].token_ids, [50]])
    return [replace(samples[0], token_ids=tokens, loss_mask=np.concatenate([samples[0].loss_mask, [True]]))]


def gives_no_number(samples):
    samples[0].sequence_data["bonus"] = float("nan")
    return samples


NOT_A_FUNCTION = 3
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_choice.py").write_text(FUNCTIONS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "acme_choice", raising=False)


class Roles:
    """A generator whose tokens follow from its name, prompt and seed; a reward and trainers whose numbers follow from
    the tokens.
    """

    def __init__(self) -> None:
        self.data = PlainData()
        self.asked: list[GenerateRequest] = []
        self.computed: list[tuple[str, TrainBatch, OutputRequest]] = []
        self.refuses: set[str] = set()

    def begin(self) -> None:
        pass

    def devices(self) -> dict[str, frozenset[Any]]:
        return {}

    async def completion(self, role: str, request: Any) -> Completion:
        asked: GenerateRequest = request.generate_request
        self.asked.append(asked)
        await asyncio.sleep(0)
        if asked.id in self.refuses:
            raise BackendError("it does not fit")
        if asked.forced_ids is not None:
            logprobs = -asked.forced_ids.astype(np.float32) * np.float32(asked.sampling.temperature)
            spans = (VersionSpan(0, len(logprobs), 3),)
            basis = asked.sampling.basis
            return Completion(asked.id, asked.forced_ids, logprobs, basis, "stop", asked.sampling, spans)
        first = asked.sampling.seed % 5 + (20 if role == "rival" else 10)
        tokens = np.array([first, len(asked.prompt_ids)])[: asked.sampling.max_tokens]
        logprobs = np.full(len(tokens), -0.5, np.float32)
        spans = (VersionSpan(0, len(tokens), 3),)
        return Completion(asked.id, tokens, logprobs, asked.sampling.basis, "stop", asked.sampling, spans)

    def reward(self, role: str) -> Any:
        return Reward(role)

    def trainer(self, role: str) -> Any:
        return Trainer(self, role)


class Reward:
    def __init__(self, role: str) -> None:
        self.role = role

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        await asyncio.sleep(0)
        factor = 1.0 if self.role == "reward" else 0.1
        return [RewardResult(factor * float(sample.token_ids[3:].sum())) for sample in samples]


class Trainer:
    def __init__(self, roles: Roles, role: str) -> None:
        self.roles, self.role = roles, role

    async def compute(self, batch: TrainBatch, request: OutputRequest) -> dict[str, Any]:
        self.roles.computed.append((self.role, batch, request))
        outputs: dict[str, Any] = {}
        for name in request.names:
            if name == "topk_ids":
                outputs[name] = batch.token_ids[:, None] + torch.arange(int(request.arguments["k"]))
            elif name == "topk_logprobs":
                outputs[name] = -torch.ones(batch.num_tokens, int(request.arguments["k"]))
            elif name == "logprobs_at":
                outputs[name] = -batch.token_data[str(request.arguments["ids"])].float()
            else:
                outputs[name] = -batch.token_ids.float() / request.temperature
        return outputs


async def run(flow: Callable[[Any, Any], Any], roles: Roles | None = None, groups: int = 2, size: int = 2) -> Any:
    """The samples of a flow over prompts p0, p1, ..., in the order of the requests."""
    roles = roles or Roles()
    graph = trace(flow, ROLES)
    draws = [ExampleDraw(Prompt(f"p{i}", np.array([1, 2, 3 + i]), "?"), 0, f"p{i}@1") for i in range(groups)]
    requests = make_requests(draws, size, SAMPLING, 7, graph.calls("generator.generate"))
    scheduler = FlowScheduler(graph, roles, sampling=SAMPLING, seed=7, front=roles)  # type: ignore[arg-type]  # the part that is used
    async with asyncio.timeout(30):
        return await scheduler.run(requests, Timers())


async def test_a_role_is_called_several_times_under_names_with_arguments_of_its_own() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        teacher = m.join(samples, m.teacher.topk(samples, k=3, temperature=2.0))
        return m.join(
            teacher,
            m.trainer.logprobs(samples),
            m.trainer.logprobs(samples, temperature=1.0, name="cold"),
            m.trainer.logprobs_at(teacher, ids="teacher_topk_ids"),
            m.reward.score(samples),
            m.style.score(samples, name="style"),
        )

    roles = Roles()
    samples = await run(flow, roles)
    assert sorted(request.temperature for _, _, request in roles.computed) == [0.5, 0.5, 1.0, 2.0]
    for sample in samples:
        tokens = sample.token_ids
        assert sample.token_data["trainer_logprobs"].tolist() == (-tokens / 0.5).tolist()
        assert sample.token_data["cold_logprobs"].tolist() == (-tokens).tolist()
        assert sample.token_data["teacher_topk_ids"].dtype == np.int64
        assert sample.token_data["teacher_topk_ids"].tolist() == [[t, t + 1, t + 2] for t in tokens]
        assert sample.token_data["trainer_logprobs_at"].tolist() == (-sample.token_data["teacher_topk_ids"]).tolist()
        assert sample.reward.value == tokens[3:].sum()
        assert sample.sequence_data["style_reward"] == pytest.approx(0.1 * tokens[3:].sum())


async def test_a_sample_that_a_named_reward_or_a_score_fails_on_is_excluded_and_the_others_go_on() -> None:
    class Undecided(Roles):
        def reward(self, role: str) -> Any:
            return Silent(role) if role == "style" else Reward(role)

    class Silent(Reward):
        async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
            return [RewardResult(None, error="none") if s.id == "p0@0#0" else RewardResult(2.0) for s in samples]

    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        style, scored = m.style.score(samples, name="style"), m.rival.score(samples)
        return m.join(samples, style, scored, m.trainer.logprobs(m.join(samples, style, scored)))

    roles = Undecided()
    roles.refuses = {"p1@0#1?2"}
    samples = await run(flow, roles)
    assert [sample.exclusion for sample in samples] == [
        "reward failed: none",
        None,
        None,
        "scoring failed: generation failed: it does not fit",
    ]
    [(_, batch, _)] = roles.computed
    assert batch.sequence_data["style_reward"].tolist() == [0.0, 2.0, 2.0, 2.0]
    assert batch.token_data["rival_score_logprobs"][-5:].tolist() == [0.0] * 5
    assert all("trainer_logprobs" in sample.token_data for sample in samples)


async def test_two_generators_play_against_each_other_in_the_groups_of_their_prompts() -> None:
    def self_play(prompts: Any, m: Any) -> Any:
        ours = m.generator.generate(prompts)
        theirs = m.rival.generate(prompts, temperature=0, n=1)
        ours = m.join(ours, m.trainer.entropy(ours, name="seen"))
        theirs = m.join(theirs, m.teacher.entropy(theirs, name="seen"))
        both = m.join_groups(ours, theirs)
        return m.join(both, m.reward.score(both), m.trainer.logprobs(both))

    roles = Roles()
    roles_graph = trace(self_play, ROLES)
    assert roles_graph.nodes[-1].samples_of == (0, 1)

    class PositiveEntropy(Trainer):
        async def compute(self, batch: TrainBatch, request: OutputRequest) -> dict[str, Any]:
            return {
                name: abs(values) * (1 if name == "entropy" else -1)
                for name, values in (await super().compute(batch, request)).items()
            }

    roles.trainer = lambda role: PositiveEntropy(roles, role)  # type: ignore[method-assign]
    samples = await run(self_play, roles)
    assert [sample.id for sample in samples] == [
        "p0@0#0",
        "p0@0#1",
        "p0@0#rival_2.0",
        "p1@0#0",
        "p1@0#1",
        "p1@0#rival_2.0",
    ]
    assert {sample.group_id for sample in samples[:3]} == {"p0@0"}
    assert [sample.turns[0].generator for sample in samples[:3]] == ["generator", "generator", "rival"]
    assert samples[2].turns[0].sampling.temperature == 0
    assert all(sample.token_data["seen_entropy"].any() and sample.reward is not None for sample in samples)
    sizes = {(role, next(iter(request.names))): batch.num_sequences for role, batch, request in roles.computed}
    assert sizes == {("trainer", "entropy"): 4, ("teacher", "entropy"): 2, ("trainer", "logprobs"): 6}


@pytest.mark.parametrize("name", ["best_of", "best_of_async"])
async def test_a_function_selects_within_groups_off_the_event_loop(name: str) -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        best = m.apply(f"acme_choice:{name}", m.join(samples, m.reward.score(samples)), keep=1)
        return m.join(best, m.trainer.logprobs(best))

    roles = Roles()
    samples = await run(flow, roles, groups=3, size=4)
    import acme_choice  # type: ignore[import-not-found]  # written by the fixture

    assert threading.main_thread().name not in acme_choice.THREADS
    [(_, batch, _)] = roles.computed
    for group in range(3):
        members = samples[4 * group : 4 * group + 4]
        admitted = [sample for sample in members if sample.exclusion is None]
        assert len(admitted) == 1
        assert admitted[0].reward.value == max(sample.reward.value for sample in members)
        assert {s.exclusion for s in members if s not in admitted} == {f"left out by acme_choice:{name}"}
        assert admitted[0].id in batch.sample_ids
    assert batch.num_sequences == 3, "nothing is computed for samples that were left out"


async def test_two_rounds_with_an_observation_in_between() -> None:
    """Rewards of the first round are for the function; the data of every turn lines up with its tokens."""

    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        for _ in range(2):
            samples = m.apply("acme_choice:answer_back", m.join(samples, m.reward.score(samples)))
            samples = m.generator.extend(samples, max_tokens=1)
        return m.join(samples, m.reward.score(samples), m.trainer.logprobs(samples))

    roles = Roles()
    samples = await run(flow, roles, groups=1)
    for index, sample in enumerate(samples):
        tokens = sample.token_ids.tolist()
        assert tokens[:3] == [1, 2, 3]
        assert tokens[5:7] == tokens[8:10] == [50, 51]
        assert [(turn.start, turn.stop) for turn in sample.turns] == [(3, 5), (7, 8), (10, 11)]
        assert sample.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] + [False] * 2 + [True]
        assert sample.token_data["policy_version"].tolist() == [-1] * 3 + [3] * 2 + [-1] * 2 + [3] + [-1] * 2 + [3]
        assert (sample.token_data["generator_logprobs"] != 0).tolist() == sample.loss_mask.tolist()
        assert sample.token_data["trainer_logprobs"].tolist() == [-2.0 * token for token in tokens]
        assert sample.reward.value == sum(tokens[3:])
        turns = [request for request in roles.asked if request.id.startswith(f"p0@0#{index}+")]
        assert [request.prompt_ids.tolist() for request in turns] == [tokens[:7], tokens[:10]]
    seeds = [request.sampling.seed for request in roles.asked]
    assert len(set(seeds)) == len(seeds) == 6, "every turn has random numbers of its own"
    again = Roles()
    await run(flow, again, groups=1)
    assert sorted(request.sampling.seed for request in again.asked) == sorted(seeds)
    assert pack_samples(samples).loss_mask.sum() == 8


class Staggered(Roles):
    """A generator whose completions are done one after the other, and that counts what it is asked at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.together: set[tuple[str, ...]] = set()

    async def completion(self, role: str, request: Any) -> Completion:
        self.open.append(request.generate_request.id)
        for _ in range(10 * len(self.open)):
            await asyncio.sleep(0)
        self.together.add(tuple(self.open))
        self.open.remove(request.generate_request.id)
        return await super().completion(role, request)


@pytest.mark.parametrize(("call", "mark"), [("extend", "+1"), ("score", "?1")])
async def test_what_depends_on_samples_is_asked_for_all_of_them_together(call: str, mark: str) -> None:
    """Whenever the samples were done: what an engine batches, and how it rounds, must not depend on that."""

    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        return m.join(samples, m.generator.score(samples)) if call == "score" else m.generator.extend(samples)

    roles = Staggered()
    await run(flow, roles)
    first = {names[0] for names in roles.together}
    assert f"p0@0#0{mark}" in first
    assert tuple(f"p{i}@0#{j}{mark}" for i in range(2) for j in range(2)) in roles.together
    assert not any(mark in "".join(names) and any(mark not in name for name in names) for names in roles.together)


async def test_further_turns_are_sampled_as_the_step_says() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        return m.generator.extend(m.generator.generate(prompts), max_tokens=1)

    roles, graph = Roles(), trace(flow, ROLES)
    draw = ExampleDraw(Prompt("p0", np.array([1, 2, 3]), "?"), 0, "p0@1")
    warm = SamplingParams(max_tokens=2, temperature=0.9)
    requests = make_requests([draw], 1, warm, 7, graph.calls("generator.generate"))
    scheduler = FlowScheduler(graph, roles, sampling=SAMPLING, seed=7, front=roles)  # type: ignore[arg-type]  # as above
    await scheduler.run(requests, Timers())
    assert [(asked.sampling.temperature, asked.sampling.max_tokens) for asked in roles.asked] == [(0.9, 2), (0.9, 1)]


async def test_a_sample_that_cannot_be_continued_is_excluded_and_passed_by() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.extend(m.generator.generate(prompts))
        return m.join(samples, m.reward.score(samples), m.trainer.logprobs(samples))

    roles = Roles()
    roles.refuses = {"p0@0#1+1", "p1@0#0"}
    samples = await run(flow, roles)
    assert [sample.exclusion for sample in samples] == [
        None,
        "generation failed: it does not fit",
        "generation failed: it does not fit",
        None,
    ]
    assert [len(sample.turns) for sample in samples] == [2, 1, 0, 2]
    [(_, batch, _)] = roles.computed
    assert batch.sample_ids == ("p0@0#0", "p1@0#1")


async def test_a_generator_scores_tokens_that_another_one_sampled() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.extend(m.apply("acme_choice:answer_back", m.generator.generate(prompts)))
        return m.join(samples, m.rival.score(samples, temperature=2.0, name="teacher"), m.generator.score(samples))

    for sample in await run(flow):
        tokens, mask = sample.token_ids, sample.loss_mask
        assert sample.token_data["teacher_score_logprobs"].tolist() == (tokens * -2.0 * mask).tolist()
        assert sample.token_data["generator_score_logprobs"].tolist() == (tokens * -0.5 * mask).tolist()
        assert mask.sum() == 4


def apply_alone(name: str, **settings: Any) -> Callable[[Any, Any], Any]:
    return lambda prompts, m: m.apply(f"acme_choice:{name}", m.generator.generate(prompts), **settings)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "fails",
            r"acme_choice:fails \(.*acme_choice.py:\d+\), applied to samples 'p0@0#0', 'p0@0#1': KeyError",
        ),
        ("fails_async", r"KeyError: 'difficulty' at .*acme_choice.py:\d+"),
        ("writes_in_place", "ValueError: assignment destination is read-only"),
        ("forgets_to_return", "it returned a NoneType; it must return a list of the samples"),
        ("returns_numbers", "its list holds a float; it must hold samples"),
        ("returns_twice", "it returned sample 'p0@0#0' twice"),
        ("changes_tokens", "sample 'p0@0#0': its 5 tokens changed; a function may only add tokens behind them"),
        ("trains_on_what_it_wrote", "loss_mask has 6 entries for 6 tokens, or is True at a token that the policy did"),
        ("gives_no_number", "sequence_data 'bonus' is nan; it is a finite number"),
    ],
)
async def test_a_bad_function_ends_the_run_with_function_file_and_sample(name: str, says: str) -> None:
    with pytest.raises(FlowError, match=says):
        await run(apply_alone(name), groups=1)


async def test_a_function_that_hangs_is_ended_by_its_time_limit() -> None:
    with pytest.raises(BackendTimeoutError, match=r"acme_choice:hangs .* no result within 0.2 s \(m.apply"):
        await run(apply_alone("hangs", timeout_s=0.2), groups=1)


@pytest.mark.parametrize(("granularity", "calls"), [("sample", 4), ("group", 2), ("batch", 1)])
async def test_granularity_says_how_many_samples_one_call_gets(granularity: str, calls: int) -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        scored = m.join(samples, m.reward.score(samples))
        return m.apply("acme_choice:best_of", scored, granularity=granularity)

    samples = await run(flow)
    assert sum(sample.exclusion is None for sample in samples) == calls


async def test_what_a_function_adds_stays() -> None:
    samples = await run(apply_alone("bonus", by=0.5, granularity="batch"))
    assert [sample.sequence_data["bonus"] for sample in samples] == [2.5] * 4


async def test_a_reward_that_failed_keeps_its_sample_from_functions_and_turns() -> None:
    class Picky(Reward):
        async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
            found = await super().score(samples)
            return [
                RewardResult(None, error=f"sample {sample.id!r}: no verdict") if sample.id.endswith("#1") else result
                for sample, result in zip(samples, found, strict=True)
            ]

    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        return m.apply("acme_choice:best_of", m.join(samples, m.reward.score(samples)), keep=2)

    roles = Roles()
    roles.reward = lambda role: Picky(role)  # type: ignore[method-assign]
    samples = await run(flow, roles, groups=1)
    assert [sample.exclusion for sample in samples] == [None, "reward failed: no verdict"]


async def test_a_call_on_some_data_sources_computes_those_alone_and_gives_the_others_zeros() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        return m.join(
            samples,
            m.teacher.topk(samples, k=3, data_sources=["maths"]),
            m.trainer.logprobs(samples, data_sources=["poems"]),
        )

    roles, graph = Roles(), trace(flow, ROLES)
    draws = [
        ExampleDraw(Prompt(f"p{i}", np.array([1, 2, 3 + i]), "?", data_source=source), 0, f"p{i}@1")
        for i, source in enumerate(["maths", "code", "maths"])
    ]
    requests = make_requests(draws, 1, SAMPLING, 7, graph.calls("generator.generate"))
    samples = await FlowScheduler(graph, roles, sampling=SAMPLING, seed=7, front=roles).run(requests, Timers())  # type: ignore[arg-type]  # the part that is used
    [(role, batch, request)] = roles.computed  # no poems: the trainer is not asked at all
    assert (role, batch.sample_ids, request.arguments) == ("teacher", (samples[0].id, samples[2].id), {"k": 3})
    for sample, is_taught in zip(samples, (True, False, True), strict=True):
        ids, logprobs = (sample.token_data[f"teacher_topk_{name}"] for name in ("ids", "logprobs"))
        assert (ids.shape, ids.dtype, logprobs.dtype) == ((len(sample.token_ids), 3), np.int64, np.float32)
        assert (ids.any(), logprobs.any()) == (is_taught, is_taught)
        assert not sample.token_data["trainer_logprobs"].any()
    assert {"teacher_topk_ids", "trainer_logprobs"} <= pack_samples(samples).token_data.keys()
