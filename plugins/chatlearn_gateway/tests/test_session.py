"""Sessions without a server: the tokens of thinking models, with their published chat templates, and bad requests."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from chatlearn_chat import ChatTemplateRenderer
from chatlearn_chat.turn_reader import TurnReader
from chatlearn_core.protocols import RolloutContext, RolloutOrder
from chatlearn_core.types import Prompt, SamplingParams
from chatlearn_gateway.chat import ChatRequest, RefusedError, Reply
from chatlearn_gateway.session import Session
from chatlearn_hf.tiny import build_tiny_tokenizer
from chatlearn_testing.fakes.scripted import Scripted
from chatlearn_testing.published_templates import published_template

QUESTION = {"role": "user", "content": "what is 1 + 1?"}
AGAIN = {"role": "user", "content": "sure?"}


def session_of(tokenizer: Any, *texts: Any, **limits: Any) -> tuple[Session, Scripted]:
    generator = Scripted(tokenizer, list(texts))
    prompt = Prompt("p", np.array([5, 6], np.int64), "what is 1 + 1?")
    order = RolloutOrder("p@0#0", "p@0", prompt, SamplingParams(50), 7, limits.get("max_tokens", 1000), 60.0, None)
    context = RolloutContext(order, tokenizer, generator)
    reader = TurnReader(ChatTemplateRenderer(tokenizer, max_tokens=order.max_tokens))
    return Session(context, reader), generator


async def asked(session: Session, *messages: Any) -> Reply:
    reply = await session.reply(ChatRequest(messages=messages))
    reply.commit()
    return reply


@pytest.mark.parametrize("strips", [False, True])
async def test_a_client_that_strips_thoughts_branches(strips: bool) -> None:
    """Qwen3's template strips the thoughts of earlier turns. A client that keeps them goes on from the sampled tokens;
    one that strips them gets a sample of its own, whose prompt is what the engine saw: no thought."""
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = published_template("qwen3")
    thought = "<think>\nso\n</think>\n\n"
    session, generator = session_of(tokenizer, f"{thought}It is 2.", "Yes.")
    first = await asked(session, QUESTION)
    assert first.content == f"{thought}It is 2."
    content = "It is 2." if strips else first.content
    await asked(session, QUESTION, {"role": "assistant", "content": content}, AGAIN)
    samples, seen = session.samples(), generator.asked[1].prompt_ids.tolist()
    begin = "<|im_start|>user\nwhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    end = "<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(seen) == begin + content + end
    naive = tokenizer.encode(begin + "It is 2." + end, add_special_tokens=False)
    assert (seen == naive) == strips
    assert session.counts.branches == int(strips)
    assert len(samples) == (2 if strips else 1)
    longest = samples[0]
    assert longest.token_ids[: len(seen)].tolist() == seen
    assert tokenizer.decode(longest.token_ids[longest.loss_mask]) == (
        "Yes.<|im_end|>" if strips else f"{thought}It is 2.<|im_end|>Yes.<|im_end|>"
    )
    if strips:
        assert tokenizer.decode(samples[1].token_ids[samples[1].loss_mask]) == f"{thought}It is 2.<|im_end|>"


async def test_a_client_sees_only_what_gpt_oss_says_to_it() -> None:
    """Its thoughts are a message in a channel of their own; the next turn goes on from all of its tokens."""
    tokenizer = build_tiny_tokenizer()
    special = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.eos_token = "<|return|>"
    tokenizer.chat_template = published_template("gptoss")
    final = ("<|channel|>", "final", "<|message|>")
    turn = ("<|channel|>", "analysis", "<|message|>", "so", "<|end|>", "<|start|>", "assistant", *final, "It is 2.")
    session, generator = session_of(tokenizer, turn, (*final, "Yes."))
    first = await asked(session, QUESTION)
    assert first.content == "It is 2."
    second = await asked(session, QUESTION, {"role": "assistant", "content": "It is 2."}, AGAIN)
    assert second.content == "Yes."
    [sample] = session.samples()
    behind = "<|return|><|start|>user<|message|>sure?<|end|><|start|>assistant"
    assert tokenizer.decode(generator.asked[1].prompt_ids).endswith("".join(turn) + behind)
    assert (
        tokenizer.decode(sample.token_ids[sample.loss_mask])
        == f"{''.join(turn)}<|return|>{''.join(final)}Yes.<|return|>"
    )


async def test_a_message_of_ten_megabytes_is_refused_without_being_encoded(tokenizer: Any) -> None:
    session, _ = session_of(tokenizer, "2", "Yes.")
    copied = await session.reader.apart(lambda reader: reader)
    assert copied.renderer.tokenizer is not tokenizer, "encoding changes settings of a tokenizer that the loop uses"
    copied.renderer.tokenizer.encode = pytest.fail
    huge = {"role": "tool", "content": "x" * 10_000_000, "tool_call_id": "1"}
    answer = {"role": "assistant", "content": (await asked(session, QUESTION)).content}
    for messages in ((QUESTION, huge), (QUESTION, answer, huge)):
        with pytest.raises(RefusedError, match=r"too long: \d{6} tokens or more, and at most 1000 fit") as caught:
            await session.reply(ChatRequest(messages=messages))
        assert (caught.value.kind, caught.value.status) == ("context_length", 400)
    assert session.limit is not None
    assert (await asked(session, QUESTION, answer, AGAIN)).content == "Yes.", "the session goes on"


async def test_a_long_message_delays_no_other_session(tokenizer: Any) -> None:
    session, generator = session_of(tokenizer, "long", "short", max_tokens=100_000)
    copied = await session.reader.apart(lambda reader: reader)
    encode, answered = copied.renderer.tokenizer.encode, threading.Event()
    waited: list[bool] = []

    def slow(text: str, **settings: Any) -> Any:
        waited.append(answered.wait(20))
        return encode(text, **settings)

    copied.renderer.tokenizer.encode = slow
    long = asyncio.create_task(session.reply(ChatRequest(messages=({"role": "user", "content": "what " * 10_000},))))
    await asyncio.sleep(0)
    await session.reply(ChatRequest(messages=(QUESTION,)))
    answered.set()
    await long
    assert waited == [True], "the short one was answered first"
    assert generator.asked[1].prompt_ids.tolist() == tokenizer.encode(
        f"<|im_start|>user\n{'what ' * 10_000}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "object", "properties": {"a": {"type": "int"}}}, r"at \$.properties.a.type: 'int' is not valid"),
        ({"type": "array"}, "not of an object: type is 'array'"),
        ({"type": "object", "properties": {"a": {"pattern": "("}}}, "not a JSON Schema"),
        ({"type": "object", "properties": 3}, r"at \$.properties: 3 is not of type 'object'"),
    ],
)
async def test_a_tool_whose_parameters_are_no_schema_is_refused(parameters: Any, words: str, tokenizer: Any) -> None:
    session, _ = session_of(tokenizer, "2")
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    good = {"type": "function", "function": {"name": "now"}}
    with pytest.raises(RefusedError, match=f"the parameters of tool 'add' are .*{words}") as caught:
        await session.reply(ChatRequest(messages=(QUESTION,), tools=(good, tool)))
    assert (caught.value.status, caught.value.parameter) == (400, "tools")
    assert (await session.reply(ChatRequest(messages=(QUESTION,), tools=(good,)))).content == "2"
