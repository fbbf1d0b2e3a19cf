"""What the plan of a run says about its mode, and which configurations a mode refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chatlearn_async import plan
from chatlearn_async.options import AsyncOptions, OneStepOffOptions
from chatlearn_core.exceptions import ConfigError

ASYNC = {"mode": "async", "max_staleness": 3}
NOT_REPEATABLE = "rollout.options.replay cannot repeat this run: completions stay in the engine at a weight sync"
ROLLING = "weight_sync.fleet_rule=rolling"
FORGETFUL = "roles.generator.backend=fake_forgetful"


def test_sync_and_async_without_staleness_take_turns(runs: Any) -> None:
    assert runs.assemble("a", {}).mode == ("sync: rollouts and updates take turns",)
    [line] = runs.assemble("b", {"mode": "async", "max_staleness": 0}).mode
    assert line == "async with max_staleness 0: rollouts and updates take turns, as in sync"


@pytest.mark.parametrize(
    ("options", "overrides", "line"),
    [
        ({}, [], "unfinished completions of generator (fake) are aborted and resume from their tokens"),
        (
            {"during_sync": "pause"},
            [],
            "generator (fake) stay in the engine, which recomputes their KV cache",
        ),
        ({"during_sync": "wait"}, [], "wait until every rollout has ended"),
        ({}, [FORGETFUL], "wait until every rollout has ended"),
        ({}, [FORGETFUL, ROLLING], "wait until every rollout has ended"),
        ({"replay": "a.jsonl"}, [ROLLING], "of generator (fake) are aborted and resume from their tokens under"),
    ],
)
def test_the_plan_says_what_generators_do_at_a_weight_sync(
    options: dict[str, Any], overrides: list[str], line: str, runs: Any
) -> None:
    first, second, *_ = runs.assemble("a", {**ASYNC, "options": options}, *overrides).mode
    assert first == (
        "async: rollouts are made up to 3 step(s) ahead; tokens are at most 3 policy version(s) old when they are "
        "trained on"
    )
    assert second.startswith("at a weight sync: ")
    assert line in second


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("fake", "of generator (fake) are aborted and resume from their tokens on other replicas"),
        ("fake_keeping", "of generator (fake_keeping) stay in the engine with the KV cache of the old weights"),
    ],
)
def test_where_replicas_load_in_turns_the_others_go_on(backend: str, text: str, runs: Any) -> None:
    _, *lines = runs.assemble("a", ASYNC, ROLLING, f"roles.generator.backend={backend}").mode
    assert lines == [
        "at a weight sync: completions go on, except on the replicas whose turn it is to load weights",
        f"at a weight sync: unfinished completions of these replicas {text}",
        *([] if "aborted" in text else [NOT_REPEATABLE]),
    ]


@pytest.mark.parametrize(
    ("options", "overrides", "is_repeatable"),
    [
        ({}, [], True),
        ({}, [ROLLING], True),
        ({"during_sync": "pause"}, [], False),
        ({"during_sync": "continue"}, [ROLLING, "roles.generator.backend=fake_keeping"], False),
    ],
)
def test_the_plan_says_whether_a_run_can_be_repeated(
    options: dict[str, Any], overrides: list[str], is_repeatable: bool, runs: Any
) -> None:
    lines = runs.assemble("a", {**ASYNC, "options": options}, *overrides).mode
    assert (NOT_REPEATABLE in lines) != is_repeatable


@pytest.mark.parametrize(
    ("rollout", "overrides", "message"),
    [
        (
            {**ASYNC, "options": {"during_sync": "continue"}},
            [],
            "during_sync is 'continue', but weight_sync.fleet_rule is 'barrier', with which all replicas load at once. "
            "Set it to rolling",
        ),
        (
            {**ASYNC, "options": {"during_sync": "continue"}},
            [ROLLING, FORGETFUL],
            r"is 'continue', but generator 'fake_forgetful' \(roles.generator\) does not resume completions",
        ),
        (
            {**ASYNC, "options": {"during_sync": "continue", "replay": "admissions.jsonl"}},
            [ROLLING],
            "which only during_sync: abort determines; it is 'continue'. Remove replay, or set during_sync: abort",
        ),
        (
            {**ASYNC, "options": {"during_sync": "abort"}},
            [FORGETFUL],
            r"during_sync is 'abort', but generator 'fake_forgetful' \(roles.generator\) does not resume completions",
        ),
        (
            {**ASYNC, "options": {"during_sync": "pause"}},
            [FORGETFUL],
            r"during_sync is 'pause', but generator 'fake_forgetful' \(roles.generator\) ends unfinished requests",
        ),
        (
            {**ASYNC, "request_timeout_s": 5.0, "options": {"during_sync": "pause"}},
            [],
            "rollout.request_timeout_s would also count the time of the pause. Set it to auto, or to wait",
        ),
        (
            {**ASYNC, "options": {"replay": "admissions.jsonl"}},
            [FORGETFUL],
            "which only during_sync: abort determines; it is 'wait'",
        ),
        (
            {**ASYNC, "work_stealing": True, "max_concurrent": 2, "options": {"replay": "admissions.jsonl"}},
            [],
            "needs batches that do not depend on timing: set rollout.work_stealing: false",
        ),
        (
            {"mode": "one_step_off", "max_staleness": 3},
            [],
            "rollout.max_staleness is 3, but with rollout.mode one_step_off every token is one policy version old",
        ),
        (
            {"mode": "async", "max_staleness": 0, "options": {"turns": "free"}},
            [],
            "rollout.options.turns is 'free', but with rollout.max_staleness 0 a run equals one with rollout.mode",
        ),
        (
            {**ASYNC, "options": {"turns": "together", "replay": "admissions.jsonl"}},
            [],
            "turns is 'together', but the record of rollout.options.replay says when each turn was sampled. Remove",
        ),
        ({"mode": "one_step_off", "options": {"turns": "free"}}, [], "rollout.options.turns: .*unknown"),
        ({"mode": "asinc"}, [], "Did you mean 'async'"),
        ({"mode": "async"}, ["algorithm.options.importance_correction=none"], "treat them as on-policy"),
    ],
)
def test_what_does_not_suit_a_mode_is_refused(
    rollout: dict[str, Any], overrides: list[str], message: str, runs: Any
) -> None:
    overrides = [*overrides, "~algorithm.options.importance_threshold"] if "none" in "".join(overrides) else overrides
    with pytest.raises(ConfigError, match=message):
        runs.assemble("a", rollout, *overrides)


def test_a_flow_that_generates_nothing_is_refused() -> None:
    config = SimpleNamespace(rollout=SimpleNamespace(mode="async"), algorithm=SimpleNamespace(name="sft"))
    loaded: Any = SimpleNamespace(source="run.yaml", config=config)
    graph: Any = SimpleNamespace(nodes=())
    for refuse in (
        lambda: plan.asynchronous(AsyncOptions(), loaded, graph),
        lambda: plan.one_step_off(OneStepOffOptions(), loaded, graph),
    ):
        with pytest.raises(ConfigError, match=r"the flow of algorithm 'sft' generates nothing. Set rollout.mode: sync"):
            refuse()


def test_a_reward_that_asks_the_generator_itself_is_waited_for(runs: Any) -> None:
    """Its requests are not the flow's, so nothing could resume them."""
    loaded = runs.assemble("a", ASYNC).loaded
    judged: Any = SimpleNamespace(
        nodes=(SimpleNamespace(kind="reward", role="judge", uses=("generator",)),), calls=lambda name: ()
    )
    assert plan.during_sync(AsyncOptions(), loaded, judged) == "wait"
    with pytest.raises(ConfigError, match=r"roles.judge sends requests of its own to roles.generator, which do not"):
        plan.during_sync(AsyncOptions(during_sync="abort"), loaded, judged)
