"""A remote reward server: what is sent, in what portions, what is repeated, and what becomes of each failure."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from chatlearn_core.exceptions import RoleLostError
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import RewardResult, Sample
from chatlearn_rewards.http_options import HttpOptions
from chatlearn_rewards.http_reward import HttpReward
from chatlearn_testing.fakes.http_server import FakeHttpServer, HttpReply

KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def scored(server: FakeHttpServer, *calls: list[Sample], **options: Any) -> list[RewardResult]:
    """The results of concurrent calls, end to end."""
    settings = {"url": f"{server.url}/score", "api_key_env": "SCORER_KEY", "backoff_s": 0.01, "retries": 2}
    reward = HttpReward(HttpOptions(**{**settings, **options}), RoleContext("reward"))
    reward.setup()

    async def together() -> list[RewardResult]:
        return [one for of_call in await asyncio.gather(*(reward.score(call) for call in calls)) for one in of_call]

    try:
        return asyncio.run(together())
    finally:
        reward.close()
        reward.close()


def lengths(body: Any, number: int) -> HttpReply:
    """Each completion's length, in the opposite order."""
    results = [{"id": row["id"], "score": len(row["completion"])} for row in body["samples"]]
    return HttpReply({"results": results[::-1]})


def test_the_request_and_the_response(make_sample: Any) -> None:
    result = {"id": "p0@0#0", "score": 2, "metrics": {"accuracy": 1}, "token_values": [0, 0.5, 1], "answer": "72"}
    with FakeHttpServer(lambda body, number: HttpReply({"results": [result]})) as server:
        sample = make_sample("so \ud800", "72", level=3, hint="none")
        options = {"columns": ["level"], "token_ids": True, "parameters": {"model": "orm"}}
        [found] = scored(server, [sample], **options)
    assert (found.value, found.components, found.answer) == (2.0, {"accuracy": 1.0}, "72")
    np.testing.assert_array_equal(found.token_values, [0, 0.5, 1])
    [(path, headers, body)] = server.requests
    assert (path, headers["content-type"]) == ("/score", "application/json")
    assert headers["authorization"] == f"Bearer {KEY}"
    row = {
        "id": "p0@0#0",
        "group_id": "p0@0",
        "data_source": "tests",
        "prompt": "What is it?",
        "messages": [{"role": "user", "content": "What is it?"}],
        "completion": "so \ud800",
        "ground_truth": "72",
        "columns": {"level": 3},
        "completion_ids": [3, 4, 5],
    }
    assert body == {"model": "orm", "samples": [row]}


def test_samples_of_concurrent_calls_share_requests(make_sample: Any) -> None:
    calls = [[make_sample("x" * n, index=n)] for n in range(10)]
    with FakeHttpServer(lengths) as server:
        results = scored(server, *calls, batch_size=4, batch_wait_s=0.2)
    assert [result.value for result in results] == list(range(10))
    assert sorted(len(body["samples"]) for _, _, body in server.requests) == [2, 4, 4]


def test_open_requests_are_bounded_and_the_rest_waits(make_sample: Any) -> None:
    def slow(body: Any, number: int) -> HttpReply:
        time.sleep(0.02)
        return lengths(body, number)

    with FakeHttpServer(slow) as server:
        samples = [make_sample("x" * n, index=n) for n in range(12)]
        results = scored(server, samples, batch_size=2, max_concurrent=2)
    assert [result.value for result in results] == list(range(12))
    assert server.most_open == 2
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    "failure",
    [HttpReply({}, 429), HttpReply({}, 500), HttpReply(b"{nonsense"), HttpReply([1, 2, 3], breaks_off=True)],
    ids=["429", "500", "not JSON", "dropped connection"],
)
def test_what_fails_for_a_time_is_tried_again(make_sample: Any, failure: HttpReply) -> None:
    with FakeHttpServer(lambda body, number: failure if number < 2 else lengths(body, number)) as server:
        results = scored(server, [make_sample("a"), make_sample("bb", index=1)])
    assert [result.value for result in results] == [1.0, 2.0]
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (HttpReply({"key": KEY}, 500), 'failed at attempt 2 of 2: HTTP status 500: \'{"key": "***"}\''),
        (HttpReply(b"<html>"), "the response is not JSON"),
        (HttpReply(hangs=True), "no complete response within timeout_s, 0.2 s"),
        (HttpReply({"a": "b" * 50}, breaks_off=True), "RemoteProtocolError"),
        (HttpReply({"problem": "too long"}, 422), 'refuses the request, HTTP status 422: \'{"problem": "too long"}\''),
    ],
    ids=["500", "not JSON", "hangs", "dropped connection", "refused"],
)
def test_a_sample_that_the_server_cannot_score_spoils_no_other(
    make_sample: Any, failure: HttpReply, reason: str
) -> None:
    def reply(body: Any, number: int) -> HttpReply:
        poisoned = any(row["completion"] == "poison" for row in body["samples"])
        return failure if poisoned else lengths(body, number)

    with FakeHttpServer(reply) as server:
        samples = [make_sample("a"), make_sample("poison", index=1), make_sample("bb", index=2)]
        good, bad, other = scored(server, samples, timeout_s=0.2, retries=1)
    assert (good.value, other.value) == (1.0, 2.0)
    assert reason in (bad.error or "")
    assert KEY not in (bad.error or "")


GOOD = {"id": "p0@0#0", "score": 1.0}


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ([1.0], "the response has no list 'results', but is [1.0]"),
        ({"scores": [KEY]}, "the response has no list 'results', but is {'scores': ['***']}"),
        ({"results": [GOOD, GOOD]}, "the response has 2 results for 1 samples"),
        ({"results": []}, "the response has 0 results for 1 samples"),
        ({"results": [{"score": 1.0}]}, "a result has no 'id', the id of its sample: {'score': 1.0}"),
        ({"results": [{"id": "p1", "score": 1.0}]}, "the response has a result for 'p1', which was not asked for"),
        ({"results": [{"id": "p0@0#0", "score": float("nan")}]}, "the server's score is nan, not a finite number"),
        ({"results": [{"id": "p0@0#0", "score": True}]}, "the server's score is True"),
        ({"results": [{"id": "p0@0#0"}]}, "the server's score is None"),
        ({"results": [{**GOOD, "metrics": {"a": "b"}}]}, "the server's metrics are {'a': 'b'}"),
        ({"results": [{**GOOD, "token_values": [0, 1]}]}, "the server gives 2 token_values for the 3 tokens"),
        ({"results": [{**GOOD, "token_values": [0, None, 1]}]}, "the server's token_values are [0, None, 1], not a"),
        ({"results": [{**GOOD, "answer": 7}]}, "the server's answer is 7, not a text"),
        ({"results": [{"id": "p0@0#0", "error": f"no model, {KEY}"}]}, "the server says: no model, ***"),
    ],
)
def test_a_response_that_cannot_be_used_is_an_error_of_its_sample(make_sample: Any, response: Any, reason: str) -> None:
    with FakeHttpServer(lambda body, number: HttpReply(json.dumps(response).encode())) as server:
        [result] = scored(server, [make_sample("a")])
    assert reason in (result.error or "")
    assert KEY not in (result.error or "")
    assert len(server.requests) == 1, "the server answered; the same question has the same answer"


def test_a_sample_that_cannot_be_sent_is_an_error(make_sample: Any) -> None:
    with FakeHttpServer(lengths) as server:
        odd = [make_sample("a", object()), make_sample("b", float("nan"), index=1), make_sample("c", index=2)]
        results = scored(server, [*odd, make_sample("dd", index=3, level=1)], columns=["level"])
        assert ["has no column 'level'" in (result.error or "") for result in results] == [True, True, True, False]
        results = scored(server, odd)
    assert "cannot be written as JSON: Object of type object" in (results[0].error or "")
    assert "cannot be written as JSON: Out of range float" in (results[1].error or "")
    assert results[2].value == 1.0


def test_the_deadline_ends_all_attempts_and_its_error_names_the_last(make_sample: Any) -> None:
    with FakeHttpServer(lambda body, number: HttpReply({}, 503)) as server:
        begun = time.monotonic()
        results = scored(server, [make_sample("a"), make_sample("b", index=1)], deadline_s=0.4, retries=100)
        assert time.monotonic() - begun < 10
    for result in results:
        assert "gave no answer in time (deadline_s); last: attempt " in (result.error or "")
        assert "HTTP status 503" in (result.error or "")


def test_a_wrong_key_ends_the_run_and_is_not_shown(make_sample: Any) -> None:
    with (
        FakeHttpServer(lambda body, number: HttpReply({"bad key": KEY}, 401)) as server,
        pytest.raises(RoleLostError, match="the environment variable SCORER_KEY must have a key") as caught,
    ):
        scored(server, [make_sample("a")])
    assert KEY not in str(caught.value)


def test_a_wrong_address_ends_the_run(make_sample: Any) -> None:
    with (
        FakeHttpServer(lambda body, number: HttpReply({"detail": "Not Found"}, 404)) as server,
        pytest.raises(
            RoleLostError, match=r"role 'reward': http.*/score answers with HTTP status 404: .*the option url"
        ),
    ):
        scored(server, [make_sample("a"), make_sample("b", index=1)])
    assert len(server.requests) == 1


def test_a_cancelled_call_withdraws_its_samples(make_sample: Any) -> None:
    async def cancelled(reward: HttpReward, server: FakeHttpServer) -> list[RewardResult]:
        first = asyncio.ensure_future(reward.score([make_sample("hang")]))
        while not server.requests:
            await asyncio.sleep(0.005)
        second = asyncio.ensure_future(reward.score([make_sample("never", index=1)]))
        await asyncio.sleep(0.02)
        second.cancel()  # before the end of the first lets it be sent
        first.cancel()
        await asyncio.wait([first, second])
        return await reward.score([make_sample("xyz", index=2)])

    def reply(body: Any, number: int) -> HttpReply:
        return HttpReply(hangs=True) if body["samples"][0]["completion"] == "hang" else lengths(body, number)

    with FakeHttpServer(reply) as server:
        options = HttpOptions(url=server.url, max_concurrent=1, batch_wait_s=0.0, timeout_s=60)
        reward = HttpReward(options, RoleContext("reward"))
        reward.setup()
        [result] = asyncio.run(cancelled(reward, server))
        reward.close()
    assert result.value == 3.0
    assert [row["completion"] for _, _, body in server.requests for row in body["samples"]] == ["hang", "xyz"]


def test_one_sample_in_two_calls_gets_two_results(make_sample: Any) -> None:
    with FakeHttpServer(lengths) as server:
        results = scored(server, [make_sample("a")], [make_sample("a")], batch_size=2, batch_wait_s=5)
    assert [result.value for result in results] == [1.0, 1.0]
    assert [row["id"] for row in server.requests[0][2]["samples"]] == ["p0@0#0", "p0@0#0~2"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"url": "http://a?key=1"}, "url has a user, a password, a query or a fragment"),
        ({"url": "http://a", "parameters": {"samples": 1}}, "parameters has 'samples', the field that holds"),
        ({"url": "http://a", "batch_size": 0}, "batch_size"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem.replace("(", r"\(")):
        HttpOptions(**options)
