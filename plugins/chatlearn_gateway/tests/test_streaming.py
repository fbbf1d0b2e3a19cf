"""Text that is sent while a turn is sampled, with the real clients and a generator whose tokens the test releases."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from chatlearn_chat.turn_reader import reader_of
from chatlearn_core.protocols import RolloutContext, RolloutOrder
from chatlearn_core.types import Completion, GenerateRequest, Prompt, SamplingParams, VersionSpan
from chatlearn_gateway.chat import Begun, ChatRequest, RefusedError
from chatlearn_gateway.session import Session

QUESTION: Any = [{"role": "user", "content": "what is 1 + 1?"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXT = "Grüße, 世界 👍🏽!"


class Paced:
    """Lets a generator sample as many tokens as the test has released."""

    def __init__(self) -> None:
        self.released = 0

    async def __call__(self, position: int) -> None:
        while position >= self.released:
            await asyncio.sleep(0.002)


@pytest.fixture
def pace() -> Iterator[Paced]:
    pace = Paced()
    yield pace
    pace.released = 10**9


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def client(served: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0, timeout=20)


def chat_deltas(served: Any, **request: Any) -> Iterator[str]:
    with client(served).chat.completions.create(model="policy", messages=QUESTION, stream=True, **request) as chunks:
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


def message_deltas(served: Any, **request: Any) -> Iterator[str]:
    with (
        anthropic.Anthropic(base_url=served.url, api_key=served.key, max_retries=0, timeout=20) as api,
        api.messages.stream(model="policy", max_tokens=400, messages=QUESTION, **request) as stream,
    ):
        yield from stream.text_stream
        final = stream.get_final_message()
        assert (final.content[0].text, final.stop_reason) == (TEXT, "end_turn")
        assert final.usage.output_tokens == len(TEXT.encode()) + 1
        assert final.usage.input_tokens == len(served.generator.asked[-1].prompt_ids)


def response_deltas(served: Any, **request: Any) -> Iterator[str]:
    with client(served).responses.stream(model="policy", input="what is 1 + 1?", **request) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                yield event.delta
        assert stream.get_final_response().output_text == TEXT


def recorded(served: Any) -> list[Any]:
    """Everything of the samples that training uses."""
    return [
        (
            one.id,
            one.exclusion,
            one.token_ids.tolist(),
            one.loss_mask.tolist(),
            {name: values.tolist() for name, values in one.token_data.items()},
            [(turn.start, turn.stop) for turn in one.turns],
            one.sequence_data,
        )
        for one in served.session.samples()
    ]


@pytest.mark.parametrize("deltas", [chat_deltas, message_deltas, response_deltas])
def test_deltas_arrive_while_the_turn_is_sampled(deltas: Any, serve: Any, pace: Paced) -> None:
    served = serve(TEXT, pace=pace)
    arriving = deltas(served)
    texts = []
    for released, part in ((1, "G"), (2, "r"), (4, "ü"), (6, "ß")):
        pace.released = released
        texts.append(next(arriving))
        assert texts[-1] == part
        assert not served.session.samples(), "the turn is not complete"
    pace.released = 10**9
    texts += arriving
    assert "".join(texts) == TEXT
    assert not any("\ufffd" in text for text in texts)
    until(lambda: bool(served.session.samples()))
    plain = serve(TEXT, pace=pace)
    answer = client(plain).chat.completions.create(model="policy", messages=QUESTION)
    assert answer.choices[0].message.content == TEXT
    assert recorded(served) == recorded(plain)
    assert served.session.counts.disconnected == 0


def test_what_may_be_a_tool_call_is_held_back(serve: Any, pace: Paced) -> None:
    served = serve(CALL, pace=pace)
    pace.released = len(CALL)  # all but the end of the turn
    with client(served).chat.completions.create(
        model="policy", messages=QUESTION, tools=[TOOL], stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = iter(stream)
        assert next(chunks).choices[0].delta.role == "assistant"
        texts = [next(chunks).choices[0].delta.content for _ in range(5)]  # a space waits for what is behind it
        assert "".join(texts) == "I add."
        pace.released = 10**9
        rest = list(chunks)
    calls, finish, usage = rest
    [call] = calls.choices[0].delta.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert calls.choices[0].delta.content is None
    assert finish.choices[0].finish_reason == "tool_calls"
    assert usage.usage.completion_tokens == len(CALL) + 1
    untooled = serve(CALL, pace=pace)
    assert "".join(chat_deltas(untooled)) == CALL, "without tools it is text"


@pytest.mark.parametrize(
    ("text", "first"), [("two <tool_callers> here", "two"), ("a < b  \n", "a"), (' {"name": 1}', "")]
)
def test_text_that_only_looked_like_a_call_arrives_whole(text: str, first: str, serve: Any, pace: Paced) -> None:
    pace.released = 10**9
    deltas = list(chat_deltas(serve(text, pace=pace), tools=[TOOL]))
    assert "".join(deltas) == text
    assert "".join(deltas).startswith(first)


def test_a_stop_string_is_never_sent(serve: Any, pace: Paced) -> None:
    served = serve("It is STALE. STOP", pace=pace)
    pace.released = 10  # the last is the "A" that makes it another word
    arriving = chat_deltas(served, stop=["STOP"])
    texts = [next(arriving) for _ in range(len("It is "))]
    assert "".join(texts) == "It is "
    assert next(arriving) == "STA"
    pace.released = len("It is STALE. STOP")
    texts = [next(arriving) for _ in range(len("LE. "))]
    assert "".join(texts) == "LE. "
    pace.released = 10**9
    assert "".join(arriving) == "STOP", "the generator wrote on: it does not stop at strings"


def test_logprobs_usage_and_finish_come_last(serve: Any, pace: Paced) -> None:
    pace.released = 10**9
    served = serve("Grüße", pace=pace)
    with client(served).chat.completions.stream(
        model="policy", messages=QUESTION, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        final = stream.get_final_completion()
    [choice] = final.choices
    assert (choice.message.content, choice.finish_reason) == ("Grüße", "stop")
    assert [one.logprob for one in choice.logprobs.content] == [-0.5 - i / 64 for i in range(8)]
    assert final.usage.completion_tokens == 8


def test_turns_are_stitched_as_without_streaming(serve: Any, pace: Paced) -> None:
    pace.released = 10**9

    def play(served: Any, *, stream: bool) -> None:
        api, messages = client(served), list(QUESTION)
        for _ in range(2):
            if stream:
                chunks = api.chat.completions.create(model="policy", messages=messages, stream=True)
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            else:
                text = api.chat.completions.create(model="policy", messages=messages).choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]

    streamed, plain = (serve("zwölf", "ja", pace=pace) for _ in range(2))
    play(streamed, stream=True)
    play(plain, stream=False)
    assert recorded(streamed) == recorded(plain)
    assert len(recorded(plain)[0][5]) == 2, "one sample with two turns"


def test_a_client_that_leaves_in_the_middle_is_counted_and_its_turn_given_up(serve: Any, pace: Paced) -> None:
    served = serve(TEXT, "again", pace=pace)
    pace.released = 3
    arriving = chat_deltas(served)
    assert next(arriving) == "G"
    arriving.close()
    until(lambda: served.session.counts.disconnected == 1)
    pace.released = 10**9
    assert "".join(chat_deltas(served)) == "again"
    until(lambda: bool(served.session.samples()))
    [sample] = served.session.samples()
    assert (len(sample.turns), sample.exclusion, sample.sequence_data["environment/disconnected"]) == (1, None, 1)
    assert served.session.counts.disconnected == 1


def test_a_client_that_closes_behind_the_last_event_has_not_left(serve: Any, pace: Paced) -> None:
    """Its library closes the connection at ``[DONE]``, and may not have seen the end of the body."""
    pace.released = 10**9
    texts = [f"answer {i}" for i in range(40)]
    served = serve(*texts, pace=pace)
    assert ["".join(chat_deltas(served)) for _ in texts] == texts
    time.sleep(0.1)
    assert served.session.counts.disconnected == 0


@pytest.mark.parametrize(
    ("deltas", "error"),
    [
        (chat_deltas, openai.APIError),
        (message_deltas, anthropic.APIStatusError),
        (response_deltas, openai.APIError),
    ],
)
def test_a_failure_in_the_middle_is_an_event(serve: Any, pace: Paced, deltas: Any, error: type[Exception]) -> None:
    served = serve(TEXT, pace=pace)
    pace.released = 3
    arriving = deltas(served)
    assert next(arriving) == "G"
    served.gateway.end(served.key)
    with pytest.raises(error, match="is over"):
        list(arriving)
    assert not served.session.samples()
    assert served.session.counts.disconnected == 0


@pytest.mark.parametrize("repeated", ["I am sure", "I was", "No"])
async def test_a_request_that_is_repeated(repeated: str, tokenizer: Any) -> None:
    """A replica died: tokens begin again. What was sent must be the beginning of the answer, or the request fails."""

    def ids(text: str) -> list[int]:
        return [i for part in text for i in tokenizer.encode(part, add_special_tokens=False)]

    async def generate(handle: str, request: GenerateRequest, on_tokens: Any = None, /) -> Completion:
        on_tokens(0, ids("I a"))
        for position, token in enumerate([*ids(repeated), tokenizer.eos_token_id]):
            on_tokens(position, [token])
        sampled = [*ids(repeated), tokenizer.eos_token_id]
        return Completion(
            request.id,
            np.array(sampled, np.int64),
            np.zeros(len(sampled), np.float32),
            request.sampling.basis,
            "stop",
            request.sampling,
            (VersionSpan(0, len(sampled), 0),),
        )

    prompt = Prompt("p", np.array([5, 6], np.int64), "?")
    order = RolloutOrder("p@0#0", "p@0", prompt, SamplingParams(50), 7, 1000, 60.0, None)
    session = Session(RolloutContext(order, tokenizer, generate), reader_of(tokenizer))
    sent: list[str] = []

    def on_text(begun: Begun, text: str) -> None:
        sent.append(text)

    asked = session.reply(ChatRequest(messages=tuple(QUESTION), streams=True), on_text)
    if repeated == "I am sure":
        reply = await asked
        assert "".join(sent) + "".join(piece.text for piece in reply.pieces) == reply.content == repeated
    else:
        with pytest.raises(RefusedError, match="sampled another answer") as caught:
            await asked
        assert caught.value.kind == "failed"
        assert "".join(sent) == "I a"
    assert not session.samples()
