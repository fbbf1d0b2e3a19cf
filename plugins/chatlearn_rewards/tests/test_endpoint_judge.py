"""A judge behind an endpoint: what is sent, what is repeated, and what becomes of each failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from chatlearn_core.exceptions import ConfigError, RoleLostError
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import RewardResult, Sample
from chatlearn_rewards.http_endpoint import _retry_after_s
from chatlearn_rewards.judge_options import JudgeOptions
from chatlearn_rewards.judge_reward import JudgeReward
from chatlearn_testing.fakes.http_server import FakeHttpServer, HttpReply, chat_completion

KEY = "sk-very-secret"
GOOD = chat_completion("Score: 7")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def judged(server: FakeHttpServer, samples: list[Sample], endpoint: Any = None, **options: Any) -> list[RewardResult]:
    settings = {"base_url": f"{server.url}/v1/", "model": "grader", "api_key_env": "JUDGE_KEY", "backoff_s": 0.01}
    options["endpoint"] = {**settings, "retries": 2, **(endpoint or {})}
    reward = JudgeReward(JudgeOptions(**options), RoleContext("reward", seed=3))
    reward.setup()
    try:
        return asyncio.run(reward.score(samples))
    finally:
        reward.close()
        reward.close()


def test_the_request_is_a_chat_completion(make_sample: Any) -> None:
    with FakeHttpServer(lambda body, number: GOOD) as server:
        parameters = {"seed": None, "reasoning_effort": "low"}
        options = {"template": "{completion}", "system_prompt": "Be fair", "max_tokens": 9}
        [result] = judged(server, [make_sample("a")], {"parameters": parameters}, **options)
    assert result == RewardResult(7.0, {"votes": 1.0})
    [(path, headers, body)] = server.requests
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == f"Bearer {KEY}"
    assert body == {
        "model": "grader",
        "messages": [{"role": "system", "content": "Be fair"}, {"role": "user", "content": "a"}],
        "max_tokens": 9,
        "temperature": 0.0,
        "top_p": 1.0,
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize(
    "failure",
    [
        HttpReply({"error": "busy"}, 429),
        HttpReply({}, 503),
        HttpReply(b"{broken"),
        HttpReply({"choices": [1, 2, 3]}, breaks_off=True),
    ],
    ids=["429", "503", "broken JSON", "dies in the middle"],
)
def test_what_fails_for_a_time_is_tried_again(make_sample: Any, failure: HttpReply) -> None:
    with FakeHttpServer(lambda body, number: failure if number < 2 else GOOD) as server:
        [result] = judged(server, [make_sample("a")])
    assert result.value == 7.0
    assert len(server.requests) == 3
    assert len({str(body) for _, _, body in server.requests}) == 1, "the same question, with the same seed"


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (HttpReply({"key": KEY}, 500), 'HTTP status 500: \'{"key": "***"}\''),
        (HttpReply(b"<html>"), "the response is not JSON"),
        (HttpReply(hangs=True), "no complete response within timeout_s, 0.2 s"),
        (HttpReply({"a": "b" * 50}, breaks_off=True), "RemoteProtocolError"),
    ],
    ids=["500", "broken JSON", "hangs", "dies in the middle"],
)
def test_what_fails_for_ever_excludes_its_sample(make_sample: Any, failure: HttpReply, reason: str) -> None:
    def reply(body: Any, number: int) -> HttpReply:
        return GOOD if "fine" in body["messages"][0]["content"] else failure

    with FakeHttpServer(reply) as server:
        bad, fine = judged(server, [make_sample("a"), make_sample("fine", index=1)], {"timeout_s": 0.2, "retries": 1})
        address = server.url
    assert fine.value == 7.0
    assert f"reward 'judge' of role 'reward': {address}/v1/chat/completions failed at attempt 2 of 2" in (
        bad.error or ""
    )
    assert reason in (bad.error or "")
    assert KEY not in (bad.error or "")
    assert len(server.requests) == 3, "the judge does not repeat what the endpoint repeated"


def test_nonsense_is_a_counted_exclusion(make_sample: Any) -> None:
    replies = {"a": chat_completion("who knows"), "b": chat_completion(None), "c": HttpReply({"choices": []})}
    with FakeHttpServer(lambda body, number: replies[body["messages"][0]["content"]]) as server:
        results = judged(server, [make_sample(text) for text in "abc"], template="{completion}")
    assert results[0].error == "sample 'p0@0#0': the judge gave no verdict, but 'who knows'"
    assert results[1].error == "sample 'p0@0#0': the judge gave no verdict, but ''"
    assert "has no text at choices[0].message.content" in (results[2].error or "")
    assert len(server.requests) == 6


def test_a_wrong_key_ends_the_run_and_is_not_shown(make_sample: Any) -> None:
    with (
        FakeHttpServer(lambda body, number: HttpReply({"bad key": KEY}, 401)) as server,
        pytest.raises(RoleLostError, match="the environment variable JUDGE_KEY must have a key") as caught,
    ):
        judged(server, [make_sample("a")])
    assert KEY not in str(caught.value)
    assert len(server.requests) == 1


@pytest.mark.parametrize("value", [None, "", "two words", f"{KEY}\n"])
def test_a_key_that_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("JUDGE_KEY")
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    options = JudgeOptions(endpoint={"base_url": "http://localhost", "model": "m", "api_key_env": "JUDGE_KEY"})
    with pytest.raises(ConfigError, match="the environment variable JUDGE_KEY") as caught:
        JudgeReward(options, RoleContext("reward"))
    assert KEY not in str(caught.value)


def test_retry_after_is_honoured(make_sample: Any) -> None:
    busy = HttpReply({}, 429, {"Retry-After": "1"})
    with FakeHttpServer(lambda body, number: GOOD if number else busy) as server:
        begun = time.monotonic()
        assert judged(server, [make_sample("a")])[0].value == 7.0
        assert time.monotonic() - begun >= 1.0
    with FakeHttpServer(lambda body, number: busy) as server:
        [result] = judged(server, [make_sample("a")], {"max_wait_s": 0.5})
    assert "requests a wait of 1 s (max_wait_s: 0.5)" in (result.error or "")
    assert len(server.requests) == 1
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert _retry_after_s(later) == pytest.approx(100, abs=2)
    assert _retry_after_s("soon") is None


def test_the_number_of_open_requests_is_bounded(make_sample: Any) -> None:
    def reply(body: Any, number: int) -> HttpReply:
        time.sleep(0.02)
        return GOOD

    with FakeHttpServer(reply) as server:
        results = judged(server, [make_sample(f"a{n}", index=n) for n in range(12)], {"max_concurrent": 3})
    assert [result.value for result in results] == [7.0] * 12
    assert server.most_open == 3


def test_answers_are_kept_on_disk(make_sample: Any, tmp_path: Path) -> None:
    options = {"cache": "disk", "cache_path": tmp_path / "answers.sqlite"}
    with FakeHttpServer(lambda body, number: chat_completion(f"Score: {number}")) as server:
        first = judged(server, [make_sample("a")], **options)
        assert judged(server, [make_sample("a")], **options) == first
        assert len(server.requests) == 1
        judged(server, [make_sample("a")], {"model": "another"}, **options)
        assert len(server.requests) == 2
    assert KEY.encode() not in (tmp_path / "answers.sqlite").read_bytes()


@pytest.mark.parametrize(
    "url", ["localhost:80", "ftp://a", "http://", "http://me:pw@a", "http://a?key=1", "http://a:x"]
)
def test_an_address_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="base_url"):
        JudgeOptions(endpoint={"base_url": url, "model": "m"})


def test_an_endpoint_takes_the_place_of_the_role() -> None:
    endpoint: Callable[..., Any] = JudgeOptions(endpoint={"base_url": "http://a", "model": "m"}).endpoint
    assert endpoint is not None
    assert JudgeOptions(endpoint=endpoint).used_handles == frozenset()
    assert JudgeOptions().used_handles == frozenset({"judge"})
