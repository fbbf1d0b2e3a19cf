"""What is sent of a turn while it is sampled is the beginning of what is read of it at the end."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from chatlearn_chat import ChatTemplateRenderer
from chatlearn_chat.tool_calls import FormatName
from chatlearn_chat.turn_reader import TurnReader
from chatlearn_core.types import Completion, SamplingParams, VersionSpan
from chatlearn_hf.tiny import TOOLS_TEMPLATE, build_tiny_tokenizer

TOOLS: Any = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
PARTS = (
    "a", " ", "\n", "é☃", "𝄞", "\ufffd", "<", "</think>", "STOP", "ST", "<|python_tag|>", "{", '{"name": "add"}',
    "<tool_call>", "</tool_call>", '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
    "<tool_call>add</tool_call>", "<tool_call><function=add></function></tool_call>", "<tool_", "<｜tool▁calls",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)  # fmt: skip


@cache
def reader(written: FormatName) -> TurnReader:
    tokenizer: Any = build_tiny_tokenizer(400, ["one plus two = 3 \n\n", "<tool_call> and </tool_call>\n"] * 9)
    tokenizer.chat_template = TOOLS_TEMPLATE
    return TurnReader(ChatTemplateRenderer(tokenizer), written)


def completion(ids: list[int], finish: Any, sampling: SamplingParams) -> Completion:
    zeros = np.zeros(len(ids), np.float32)
    spans = (VersionSpan(0, len(ids), 0),)
    return Completion("r", np.array(ids, np.int64), zeros, sampling.basis, finish, sampling, spans)


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from([name for name in get_args(FormatName) if name != "harmony"]),
    st.lists(st.sampled_from(PARTS), max_size=8),
    st.sampled_from(["end", "length", "string"]),
    st.booleans(),
    st.booleans(),
)
def test_what_is_sent_is_the_beginning_of_the_content(
    written: FormatName, parts: list[str], ends: str, in_bytes: bool, with_tools: bool
) -> None:
    of, tools = reader(written), TOOLS if with_tools else ()
    tokenizer, sampling = of.renderer.tokenizer, SamplingParams(100, stop=("STOP",) if ends == "string" else ())
    ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]
    if in_bytes:
        ids = [i for one in ids for i in tokenizer.convert_tokens_to_ids(list(tokenizer.convert_ids_to_tokens(one)))]
    if ends == "end":
        ids.append(tokenizer.eos_token_id)
    if ends == "string":
        ids = next((ids[:n] for n in range(len(ids) + 1) if "STOP" in tokenizer.decode(ids[:n])), ids)
    stream = of.stream(sampling, tools=tools)
    assert stream is not None
    sent = [stream.told(position, [token]) for position, token in enumerate(ids)]
    finish = "length" if ends == "length" or (ends == "string" and "STOP" not in tokenizer.decode(ids)) else "stop"
    read = of.read(completion(ids, finish, sampling), tools=tools, in_pieces=False)
    assert read.content.startswith("".join(sent))
    assert stream.sent == "".join(sent)
    at_once = of.stream(sampling, tools=tools)
    assert at_once is not None
    assert read.content.startswith(at_once.told(0, ids))
    assert not (with_tools and "<tool_call>" in stream.sent and written in ("hermes", "glm", "qwen_xml"))


def test_plain_text_is_sent_token_by_token() -> None:
    of = reader("hermes")
    ids = [i for one in "so: ü!" for i in of.renderer.tokenizer.encode(one, add_special_tokens=False)]
    stream = of.stream(SamplingParams(9), tools=())
    assert stream is not None
    assert [stream.told(i, [one]) for i, one in enumerate(ids)] == ["s", "o", ":", " ", "", "ü", "!"]


def test_what_is_known_only_at_the_end_is_not_streamed() -> None:
    assert reader("harmony").stream(SamplingParams(9), tools=()) is None, "its channels tell thoughts from answers"


def test_tokens_that_were_not_told_end_the_stream() -> None:
    of = reader("hermes")
    a, b, c = (of.renderer.tokenizer.encode(one, add_special_tokens=False)[0] for one in "abc")
    stream = of.stream(SamplingParams(9), tools=())
    assert stream is not None
    assert [stream.told(0, [a]), stream.told(2, [c]), stream.told(1, [b, c])] == ["a", "", ""]


@pytest.mark.parametrize("step", [1, 2, 9])
def test_tokens_that_are_one_byte_wait_for_the_next_that_is_none(step: int) -> None:
    """A decoder of the kind of Llama 2 takes bytes in a row together, so that a bad one changes good ones before it."""
    pieces = ["<unk>", "▁a", "b", *(f"<0x{byte:02X}>" for byte in range(256)), "</s>"]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
    of = TurnReader(ChatTemplateRenderer(tokenizer), "none")
    snowman = [3 + byte for byte in "☃".encode()]
    for ids in ([1, *snowman, 1, 2], [1, *snowman, 3 + 0xFF, 2], [1, 3 + 10, *snowman[:2]], [1, 1, *snowman]):
        stream = of.stream(SamplingParams(20), tools=())
        assert stream is not None
        sent = [stream.told(start, ids[start : start + step]) for start in range(0, len(ids), step)]
        content = of.read(completion(ids, "length", SamplingParams(20)), tools=(), in_pieces=False).content
        assert content.startswith("".join(sent))
        if ids[-1] in (1, 2):
            assert content == "".join(sent)
