"""The judge: what it is asked, how its answer is read, and what becomes of an answer without a verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from chatlearn_core.exceptions import BackendError, ConfigError, ReplicaLostError
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import UNGRADED, RewardResult, Sample, SamplingParams
from chatlearn_rewards.answer_cache import DiskCache, MemoryCache
from chatlearn_rewards.judge_options import JudgeOptions
from chatlearn_rewards.judge_reward import JudgeReward
from chatlearn_rewards.question import fill
from chatlearn_rewards.verdict import VerdictReader
from chatlearn_testing.fakes.role_handle import ScriptedHandle

Judge = Callable[..., list[RewardResult]]


def judged(handle: ScriptedHandle, samples: list[Sample], **options: Any) -> list[RewardResult]:
    reward = JudgeReward(JudgeOptions(**options), RoleContext("reward", seed=3, handles={"judge": handle}))
    reward.setup()
    try:
        return asyncio.run(reward.score(samples))
    finally:
        reward.close()


@pytest.mark.parametrize(
    ("options", "answer", "value"),
    [
        ({}, "Well. Score: 7", 7.0),
        ({}, "Score: 3 ... no, score = 4.5", 4.5),
        ({}, "seven", None),
        ({"lowest": 0, "highest": 10}, "Score: 11", None),
        ({"lowest": 0, "highest": 10, "normalise": True}, "Score: 4", 0.4),
        ({"pattern": r"\\boxed\{(.*?)\}"}, r"\boxed{2}", 2.0),
        ({"pattern": r"\\boxed\{(.*?)\}"}, r"\boxed{two}", None),
        ({"pattern": r"= (\S+)"}, "= nan", None),
        ({"labels": {"yes": 1, "no": 0}}, "No, not at all. Hm, YES.", 1.0),
        ({"labels": {"yes": 1, "no": 0}}, "nothing known", None),
        ({"labels": {"good": 1, "very good": 2}}, "It is very good", 2.0),
    ],
)
def test_the_last_verdict_in_an_answer_counts(options: Any, answer: str, value: float | None) -> None:
    assert VerdictReader(JudgeOptions(**options)).read(answer) == value


def test_votes_are_combined(make_sample: Any) -> None:
    values = [1.0, 5.0, 5.0, 3.0]
    for combine, expected in (("mean", 3.5), ("median", 4.0), ("majority", 5.0)):
        assert VerdictReader(JudgeOptions(combine=combine)).combine(values) == expected
    assert VerdictReader(JudgeOptions(combine="majority")).combine([2.0, 1.0]) == 1.0


def test_the_judge_is_shown_question_answer_and_truth(make_sample: Any) -> None:
    handle = ScriptedHandle(lambda prompt, sampling: "Score: 1")
    template = "Q {prompt} A {completion} T {ground_truth} {1+1}"
    judged(handle, [make_sample("42 {prompt}", 7)], template=template.replace("{1+1}", "{+}"), system_prompt="Be fair")
    assert handle.asked[0][0] == "[system]Be fair[user]Q What is it? A 42 {prompt} T 7 {+}[assistant]"


def test_of_several_messages_each_has_its_role(make_sample: Any) -> None:
    sample = make_sample("x")
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    sample.prompt = replace(sample.prompt, messages=messages)
    assert fill("{prompt}", sample, sample.prompt.messages) == "system: s\nuser: u"


def test_each_vote_has_a_seed_of_its_own_and_equal_texts_have_equal_ones(make_sample: Any) -> None:
    handle = ScriptedHandle(lambda prompt, sampling: f"Score: {sampling.seed % 7}")
    options = {"votes": 3, "temperature": 0.5, "cache": "off"}
    first = judged(handle, [make_sample("a"), make_sample("a", index=1), make_sample("b")], **options)
    seeds = [sampling.seed for _, sampling in handle.asked]
    assert sorted(seeds[:3]) == sorted(seeds[3:6])
    assert len(set(seeds)) == 6
    assert first[0] == first[1]
    assert first[0].components == {"votes": 3.0}
    assert judged(handle, [make_sample("b"), make_sample("a")], **options)[1] == first[0], "whatever came before"


def test_nonsense_is_asked_again_warmer_and_with_another_seed(make_sample: Any) -> None:
    def answer(prompt: str, sampling: SamplingParams) -> str:
        return "Score: 2" if sampling.temperature else "hm"

    handle = ScriptedHandle(answer)
    assert judged(handle, [make_sample("a")])[0].value == 2.0
    first, second = (sampling for _, sampling in handle.asked)
    assert (first.temperature, second.temperature) == (0.0, 0.7)
    assert first.seed != second.seed


def test_what_stays_nonsense_is_excluded_or_has_the_value_that_is_set(make_sample: Any) -> None:
    handle = ScriptedHandle(lambda prompt, sampling: "who knows")
    [result] = judged(handle, [make_sample("a")], retries=2)
    assert result.error == "sample 'p0@0#0': the judge gave no verdict, but 'who knows'"
    assert len(handle.asked) == 3
    [result] = judged(handle, [make_sample("a")], nonsense_value=-1.0)
    assert result == RewardResult(-1.0, {"votes": 0.0, UNGRADED: 1.0})


def test_a_request_that_fails_is_made_again_and_is_never_a_value(make_sample: Any) -> None:
    failures = [BackendError("out of memory")]

    def answer(prompt: str, sampling: SamplingParams) -> str:
        if failures:
            raise failures.pop()
        return "Score: 2"

    assert judged(ScriptedHandle(answer), [make_sample("a")])[0].value == 2.0
    failures += [BackendError("out of memory")] * 2
    [result] = judged(ScriptedHandle(answer), [make_sample("a")], nonsense_value=0.0)
    assert result.error == "sample 'p0@0#0': the judge did not answer: out of memory"


def test_a_judge_that_is_lost_ends_the_run(make_sample: Any) -> None:
    def answer(prompt: str, sampling: SamplingParams) -> str:
        raise ReplicaLostError("replica 0 died")

    with pytest.raises(ReplicaLostError):
        judged(ScriptedHandle(answer), [make_sample("a")])


def test_a_question_that_is_too_long_is_an_error_of_its_sample(make_sample: Any) -> None:
    handle = ScriptedHandle(lambda prompt, sampling: "Score: 2")
    long, short = judged(handle, [make_sample("a" * 30_000), make_sample("b")])
    assert "role 'scripted' takes 20000" in (long.error or "")
    assert short.value == 2.0


def test_equal_questions_are_asked_once(make_sample: Any, tmp_path: Path) -> None:
    handle = ScriptedHandle(lambda prompt, sampling: "Score: 2")
    reward = JudgeReward(JudgeOptions(), RoleContext("reward", handles={"judge": handle}))
    reward.setup()
    for _ in range(2):
        asyncio.run(reward.score([make_sample("a")]))
    assert len(handle.asked) == 1
    disk = {"cache": "disk", "cache_path": tmp_path / "answers.sqlite"}
    for _ in range(2):  # two runs
        assert judged(handle, [make_sample("b")], **disk)[0].value == 2.0
    assert len(handle.asked) == 2
    judged(handle, [make_sample("b")], max_tokens=17, **disk)
    assert len(handle.asked) == 3, "another request"


def test_answers_of_a_judge_that_learns_are_not_kept(make_sample: Any, tmp_path: Path) -> None:
    handle = ScriptedHandle(lambda prompt, sampling: "Score: 2", weights_change=True)
    reward = JudgeReward(JudgeOptions(), RoleContext("reward", handles={"judge": handle}))
    reward.setup()
    for _ in range(2):
        asyncio.run(reward.score([make_sample("a")]))
    assert len(handle.asked) == 2
    with pytest.raises(ConfigError, match="the weights of the judge change"):
        judged(handle, [], cache="disk", cache_path=tmp_path / "answers")


def test_the_memory_cache_forgets_what_was_used_longest_ago() -> None:
    cache = MemoryCache(2)
    for key in "ab":
        cache.put(key, key)
    cache.get("a")
    cache.put("c", "c")
    assert [cache.get(key) for key in "abc"] == ["a", None, "c"]


def test_a_file_that_is_no_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("not a database, but longer than a header of one would be\n" * 40)
    with pytest.raises(ConfigError, match="notes' cannot be used as a cache"):
        DiskCache(tmp_path / "notes")


def test_without_a_judge_nothing_starts() -> None:
    with pytest.raises(ConfigError, match=r"set uses: \{judge: <generator role>\}"):
        JudgeReward(JudgeOptions(), RoleContext("reward"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"template": "{question} {completion}"}, "template has {question}"),
        ({"template": "{prompt}"}, "has no {completion}"),
        ({"pattern": "("}, "is not a regular expression"),
        ({"pattern": "(a)(b)"}, "has 2 groups"),
        ({"pattern": "(a)", "labels": {"a": 1}}, "pattern and labels"),
        ({"labels": {"a": 1, "A": 2}}, "differ in more than their case"),
        ({"votes": 3}, "a greedy judge"),
        ({"normalise": True}, "give both"),
        ({"lowest": 2, "highest": 1}, "lowest must be below"),
        ({"cache": "disk"}, "needs cache_path"),
        ({"nonsense_value": float("nan")}, "finite"),
    ],
)
def test_options_that_cannot_work_are_refused(options: Any, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        JudgeOptions(**options)


def test_options_survive_the_way_to_a_worker(tmp_path: Path) -> None:
    for options in (JudgeOptions(), JudgeOptions(labels={"a": 1.0}), JudgeOptions(cache="disk", cache_path=tmp_path)):
        assert JudgeOptions(**options.model_dump()) == options
