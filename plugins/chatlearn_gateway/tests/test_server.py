"""The real clients against the server: what they get, and what is recorded."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from chatlearn_core.exceptions import BackendError

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
QUESTION = [{"role": "user", "content": "what is 1 + 1?"}]


def client(served: Any, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0, timeout=20, **settings)


def claude(served: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key=served.key, max_retries=0, timeout=20)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def sampled_ids(served: Any, *texts: str) -> list[int]:
    """Each text character by character, as the scripted generator writes it, with the end-of-turn token."""
    tokenizer = served.generator.tokenizer
    return [
        token
        for text in texts
        for token in [*(i for one in text for i in tokenizer.encode(one, add_special_tokens=False)), 2]
    ]


def test_a_completion_with_logprobs_is_what_was_sampled_and_is_recorded(serve: Any, tokenizer: Any) -> None:
    served = serve("It is 2.")
    answer = client(served).chat.completions.create(model="policy", messages=QUESTION, logprobs=True, max_tokens=30)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("It is 2.", "stop")
    [asked] = served.generator.asked
    text = "<|im_start|>user\nwhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert asked.prompt_ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert asked.sampling.max_tokens == 30
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(asked.prompt_ids), 9)
    assert [one.logprob for one in choice.logprobs.content] == [-0.5 - i / 64 for i in range(9)]
    assert b"".join(bytes(one.bytes) for one in choice.logprobs.content) == b"It is 2.<|im_end|>"
    [sample] = served.session.samples()
    ids = sampled_ids(served, "It is 2.")
    assert sample.id == "p@0#0"
    assert sample.token_ids.tolist() == [*asked.prompt_ids.tolist(), *ids]
    assert sample.loss_mask.tolist() == [False] * len(asked.prompt_ids) + [True] * 9
    assert sample.num_prompt_tokens == len(asked.prompt_ids)
    np.testing.assert_array_equal(sample.token_data["generator_logprobs"][-9:], -0.5 - np.arange(9) / 64)


def test_turns_are_stitched_by_their_tokens_and_never_encoded_again(serve: Any, tokenizer: Any) -> None:
    served = serve("two plus", "minus")
    api = client(served)
    first = api.chat.completions.create(model="policy", messages=QUESTION).choices[0].message
    messages = [*QUESTION, first.model_dump(exclude_none=True), {"role": "user", "content": "sure?"}]
    api.chat.completions.create(model="policy", messages=messages)
    one, two = served.generator.asked
    between = tokenizer.encode("\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    drifted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert two.prompt_ids.tolist() == [*one.prompt_ids.tolist(), *sampled_ids(served, "two plus"), *between]
    assert len(tokenizer.encode(drifted, add_special_tokens=False)) < len(two.prompt_ids), "encoding again would differ"
    [sample] = served.session.samples()
    assert sample.token_ids.tolist() == [*two.prompt_ids.tolist(), *sampled_ids(served, "minus")]
    mask, start = np.zeros(len(sample.token_ids), bool), len(one.prompt_ids)
    mask[start : start + 9] = mask[-6:] = True
    np.testing.assert_array_equal(sample.loss_mask, mask)
    assert sample.token_data["policy_version"][start] == 1
    assert sample.token_data["policy_version"][-1] == 2
    assert set(sample.token_data["policy_version"][start + 9 : -6].tolist()) == {-1}


def test_a_turn_cut_by_its_limit_gets_the_templates_end_of_turn(serve: Any, tokenizer: Any) -> None:
    served = serve("abcdef", "g")
    api = client(served)
    cut = api.chat.completions.create(model="policy", messages=QUESTION, max_tokens=3).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("abc", "length")
    again = [*QUESTION, {"role": "assistant", "content": "abc"}, {"role": "user", "content": "on"}]
    api.chat.completions.create(model="policy", messages=again)
    one, two = served.generator.asked
    text = "<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    added = tokenizer.encode(text, add_special_tokens=False)
    assert two.prompt_ids.tolist()[len(one.prompt_ids) + 3 :] == added


def test_branches_become_samples_and_no_token_is_trained_on_twice(serve: Any) -> None:
    served = serve("a", "b", "c", "d", "e")
    api = client(served)

    def ask(*contents: str) -> None:
        roles = ("user", "assistant")
        api.chat.completions.create(
            model="policy",
            messages=[{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)],
        )

    ask("q")
    ask("q", "a", "r")
    ask("q", "a", "s")  # diverges behind the first turn
    ask("q", "x", "s")  # an answer that was never given
    ask("q", "a", "r", "b", "t")  # goes on with the first sample
    samples = served.session.samples()
    assert [sample.id for sample in samples] == ["p@0#0", "p@0#0/1", "p@0#0/2"]
    assert [len(sample.turns) for sample in samples] == [3, 1, 1]
    assert served.session.counts.branches == 2
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == 5 * 2, "five turns of a letter and its end"
    texts = [served.generator.tokenizer.decode(sample.token_ids, skip_special_tokens=True) for sample in samples]
    assert texts[0].replace("\n", " ") == "user q assistant a user r assistant b user t assistant e"
    assert texts[2].replace("\n", " ") == "user q assistant a user s assistant c"
    shared = samples[0].turns[0].stop
    assert samples[2].token_ids[:shared].tolist() == samples[0].token_ids[:shared].tolist()
    assert not samples[2].loss_mask[:shared].any()


def test_tools_and_their_results_stay_in_one_sample(serve: Any, tokenizer: Any) -> None:
    served = serve(CALL, "2")
    api = client(served)
    message = api.chat.completions.create(model="policy", messages=QUESTION, tools=[TOOL]).choices[0].message
    [call] = message.tool_calls
    assert (message.content, call.function.name, json.loads(call.function.arguments)) == ("I add.", "add", {"a": 1})
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    answer = api.chat.completions.create(
        model="policy", messages=[*QUESTION, message.model_dump(exclude_none=True), result], tools=[TOOL]
    )
    assert answer.choices[0].message.content == "2"
    one, two = served.generator.asked
    added = tokenizer.encode("\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    assert two.prompt_ids.tolist() == [*one.prompt_ids.tolist(), *sampled_ids(served, CALL), *added]
    [sample] = served.session.samples()
    assert len(sample.turns) == 2


def test_chat_completions_stream(serve: Any) -> None:
    served = serve("Grüße", CALL)
    api = client(served)
    chunks = list(
        api.chat.completions.create(
            model="policy", messages=QUESTION, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
    )
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert texts == list("Grüße")
    logprobs = [one.logprob for chunk in chunks if chunk.choices and chunk.choices[0].logprobs
                for one in chunk.choices[0].logprobs.content]  # fmt: skip
    assert logprobs == [-0.5 - i / 64 for i in range(8)], "seven bytes and the end of the turn"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 8
    with api.chat.completions.stream(model="policy", messages=QUESTION, tools=[TOOL]) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"a": 1}
    assert [len(sample.turns) for sample in served.session.samples()] == [1, 1]


@pytest.mark.parametrize("streams", [False, True])
def test_responses(streams: bool, serve: Any) -> None:
    served = serve(CALL, "It is 2.")
    api = client(served)
    tool = {"type": "function", "strict": None, **TOOL["function"]}  # type: ignore[dict-item]

    def respond(**request: Any) -> Any:
        if not streams:
            return api.responses.create(model="policy", **request)
        with api.responses.stream(model="policy", **request) as stream:
            deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert "".join(deltas) == final.output_text
        return final

    first = respond(input="what is 1 + 1?", instructions="Be brief.", tools=[tool])
    text, call = first.output
    assert (text.content[0].text, call.name, json.loads(call.arguments)) == ("I add.", "add", {"a": 1})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    second = respond(
        input=[result],
        previous_response_id=first.id,
        instructions="Be brief.",
        tools=[tool],
        include=["message.output_text.logprobs"],
    )
    assert (second.output_text, second.status) == ("It is 2.", "completed")
    assert [one.logprob for one in second.output[0].content[0].logprobs] == [-0.5 - i / 64 for i in range(9)]
    [sample] = served.session.samples()
    assert len(sample.turns) == 2


def test_responses_of_a_client_that_sends_the_items_back(serve: Any) -> None:
    served = serve(CALL, "2")
    api = client(served)
    tool: Any = {"type": "function", "strict": None, **TOOL["function"]}  # type: ignore[dict-item]
    items: list[Any] = [{"role": "user", "content": "what is 1 + 1?"}]
    first = api.responses.create(model="policy", input=items, tools=[tool])
    items += [item.model_dump() for item in first.output]
    items.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "2"})
    assert api.responses.create(model="policy", input=items, tools=[tool]).output_text == "2"
    [sample] = served.session.samples()
    assert len(sample.turns) == 2


@pytest.mark.parametrize("streams", [False, True])
def test_anthropic_messages(streams: bool, serve: Any) -> None:
    served = serve(CALL, "It is 2. STOP here", "cut off")
    api = claude(served)
    tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}

    def create(**request: Any) -> Any:
        given = {"model": "policy", "max_tokens": 400, "system": "Be brief.", "tools": [tool], **request}
        if not streams:
            return api.messages.create(**given)
        with api.messages.stream(**given) as stream:
            "".join(stream.text_stream)
            return stream.get_final_message()

    messages: list[Any] = [*QUESTION]
    assert api.messages.count_tokens(model="policy", messages=messages, system="Be brief.", tools=[tool]).input_tokens
    first = create(messages=messages)
    text, use = first.content
    assert (text.text, use.name, use.input, first.stop_reason) == ("I add.", "add", {"a": 1}, "tool_use")
    messages += [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "2"}]},
    ]
    second = create(messages=messages, stop_sequences=["STOP"])
    assert (second.content[0].text, second.stop_reason) == ("It is 2. STOP here", "end_turn"), "it wrote on"
    third = create(messages=[*QUESTION], max_tokens=3)
    assert (third.content[0].text, third.stop_reason, third.usage.output_tokens) == ("cut", "max_tokens", 3)
    assert [len(sample.turns) for sample in served.session.samples()] == [1, 2]


def test_errors_have_the_form_of_each_protocol(serve: Any) -> None:
    served = serve(max_tokens=60, max_turns=0)
    api, other = client(served), claude(served)

    def refused(kind: type[Exception], **request: Any) -> Any:
        with pytest.raises(kind) as caught:
            api.chat.completions.create(**{"model": "policy", "messages": QUESTION, **request})
        return caught.value

    wrong = openai.OpenAI(base_url=f"{served.url}/v1", api_key="cl-no", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as unknown:
        wrong.models.list()
    assert unknown.value.code == "invalid_api_key"
    error = refused(openai.NotFoundError, model="gpt-5")
    assert (error.code, error.param) == ("model_not_found", "model")
    assert "there is no model 'gpt-5'; this server has 'policy'" in str(error)
    assert refused(openai.BadRequestError, n=2).param == "n"
    assert "tool_choice 'required' is not supported" in str(refused(openai.BadRequestError, tool_choice="required"))
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    assert "only text is" in str(refused(openai.BadRequestError, messages=[{"role": "user", "content": image}]))
    assert refused(openai.BadRequestError, messages=[]).param == "messages"
    assert refused(openai.BadRequestError).code == "turn_limit_exceeded"
    long = [{"role": "user", "content": "long " * 50}]
    assert refused(openai.BadRequestError, messages=long).code == "context_length_exceeded"
    assert served.session.limit is not None
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as anthropic_error:
        other.messages.create(model="policy", max_tokens=5, messages=long)  # type: ignore[arg-type]
    assert anthropic_error.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        other.messages.create(model="claude", max_tokens=5, messages=QUESTION)  # type: ignore[arg-type]
    answer = httpx.post(f"{served.url}/v1/embeddings", json={})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")
    assert api.models.list().data[0].id == "policy"
    assert served.session.samples() == []


def test_a_body_that_is_no_json_or_too_long_is_refused(serve: Any) -> None:
    served = serve()
    headers = {"x-api-key": served.key}
    url = f"{served.url}/v1/messages"
    assert httpx.post(url, content=b"{", headers=headers).status_code == 400
    answer = httpx.post(url, content=b"x" * ((16 << 20) + 1), headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")


def test_a_failed_generator_is_an_error_that_clients_repeat(serve: Any) -> None:
    served = serve("yes")
    served.generator.fails = BackendError("the replica died")
    with pytest.raises(openai.InternalServerError, match="the replica died"):
        client(served).chat.completions.create(model="policy", messages=QUESTION)
    served.generator.fails = None
    assert client(served).chat.completions.create(model="policy", messages=QUESTION).choices[0].message.content == "yes"
    assert len(served.session.samples()) == 1


def test_a_key_is_refused_when_its_rollout_is_over(serve: Any) -> None:
    served = serve("late", delay_s=30.0)
    api = client(served)
    with pytest.raises(openai.APITimeoutError):
        api.with_options(timeout=0.3).chat.completions.create(model="policy", messages=QUESTION)
    until(lambda: served.session.counts.disconnected == 1)
    served.gateway.end(served.key)
    with pytest.raises(openai.PermissionDeniedError, match="rollout that this key belongs to is over"):
        api.chat.completions.create(model="policy", messages=QUESTION)
    assert served.session.samples() == []


async def test_a_client_that_leaves_in_the_middle_of_a_stream_is_not_trained_on(serve: Any) -> None:
    """Without sockets, whose buffers may take the whole stream before the client has left."""
    served = serve("y" * 100, "short")
    body = json.dumps({"model": "policy", "messages": QUESTION, "stream": True}).encode()
    gone, sent = asyncio.Event(), list[Any]()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 20:
            gone.set()

    headers = [(b"authorization", f"Bearer {served.key}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    await served.gateway._application()(scope, receive, send)
    assert sent[0]["status"] == 200
    assert served.session.counts.disconnected == 1
    [unread] = served.session.samples()
    assert unread.exclusion == "client disconnected"
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0) as api:
        answer = await api.chat.completions.create(model="policy", messages=QUESTION)
    assert answer.choices[0].message.content == "short"
    sample, excluded = served.session.samples()
    assert (sample.id, sample.exclusion, len(sample.turns)) == ("p@0#0", None, 1)
    assert (excluded.id, excluded.exclusion, excluded.num_completion_tokens) == ("p@0#0/1", "client disconnected", 101)
    assert sample.sequence_data["environment/disconnected"] == 1


async def test_a_turn_that_the_buffers_took_but_the_client_did_not_read_is_excluded(serve: Any) -> None:
    served = serve("two", "y" * 400, "again")
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0) as api:
        first = await api.chat.completions.create(model="policy", messages=QUESTION)
        message = first.choices[0].message.model_dump(exclude_none=True)
        messages: Any = [*QUESTION, message, {"role": "user", "content": "go on"}]
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({"model": "policy", "messages": messages, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {served.key}\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        await asyncio.to_thread(connection.sendall, f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert await asyncio.to_thread(connection.recv, 12) == b"HTTP/1.1 200"
        await asyncio.to_thread(until, lambda: bool(served.session.samples()[0].turns[1:]))
    await asyncio.to_thread(until, lambda: served.session.counts.disconnected == 1)
    kept, unread = await served.gateway.call(served.session.samples)
    assert (len(kept.turns), kept.exclusion) == (1, None)
    assert (unread.exclusion, unread.num_completion_tokens) == ("client disconnected", 401)
    assert unread.token_ids[: len(kept.token_ids)].tolist() == kept.token_ids.tolist()
    assert not unread.loss_mask[: len(kept.token_ids)].any(), "the turn before it is trained on once"


async def test_a_turn_that_a_request_goes_on_from_has_arrived(serve: Any) -> None:
    served = serve("one", "two", "three")
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0) as api:
        for _ in range(2):  # reads to the last event and closes, which must not count as leaving
            stream = await api.chat.completions.create(model="policy", messages=QUESTION, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        again = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
        turn = next(point.turn for point in served.session._points.values() if point.turn.number == 1)
        served.session._withdraw(turn)
        assert [one.exclusion for one in served.session.samples()] == [None, "client disconnected"]
        await api.chat.completions.create(model="policy", messages=again)  # type: ignore[arg-type]
    samples = await served.gateway.call(served.session.samples)
    assert [(one.exclusion, len(one.turns)) for one in samples] == [(None, 2), (None, 1)]
    assert served.session.counts.disconnected == 0


@pytest.mark.parametrize(
    "given", [{"temperature": 0.2}, {"top_p": 0.9}, {"extra_body": {"top_k": 5}}, {"seed": 1}], ids=str
)
def test_sampling_that_is_not_the_runs_is_refused_or_overridden_and_counted(serve: Any, given: Any) -> None:
    served = serve("no")
    neutral = {"temperature": 1.0, "top_p": 1, "extra_body": {"top_k": -1, "min_p": 0}}
    assert client(served).chat.completions.create(model="policy", messages=QUESTION, **neutral).choices
    [name] = given.get("extra_body", given)
    with pytest.raises(openai.BadRequestError, match=f"{name}=.* is refused: .*request_sampling=run") as caught:
        client(served).chat.completions.create(model="policy", messages=QUESTION, **given)
    assert caught.value.param == name
    if name in ("temperature", "top_p"):
        with pytest.raises(openai.BadRequestError, match=f"{name}=.* is refused"):
            client(served).responses.create(model="policy", input="?", **given)
        with pytest.raises(anthropic.BadRequestError, match=f"{name}=.* is refused"):
            claude(served).messages.create(model="policy", max_tokens=5, messages=QUESTION, extra_body=given)  # type: ignore[arg-type]
    overriding = serve("yes", overrides=True)
    assert client(overriding).chat.completions.create(model="policy", messages=QUESTION, **given).choices
    [asked] = overriding.generator.asked
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (1.0, 1.0, 0)
    [sample] = overriding.session.samples()
    assert sample.sequence_data["environment/overridden_sampling"] == 1


async def test_sessions_are_served_concurrently_and_apart(serve: Any) -> None:
    many = [serve(f"answer {i}", delay_s=0.2) for i in range(32)]

    async def ask(served: Any) -> str:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0) as api:
            answer = await api.chat.completions.create(model="policy", messages=QUESTION)
        return answer.choices[0].message.content

    assert await asyncio.gather(*map(ask, many)) == [f"answer {i}" for i in range(32)]
    assert all(len(served.session.samples()) == 1 for served in many)
