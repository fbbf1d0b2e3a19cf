"""Whole rollouts with published chat templates: what is trained on is what the engine saw.

The templates are the models' own (``published_template``). The policy writes letter by letter, as it may sample and as
no tokenizer encodes. What must stand between two turns is written out here, read off the templates and the models'
documentation.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from chatlearn_agents.correction_environment import CorrectionEnvironment
from chatlearn_agents.options import CorrectionOptions, ToolsOptions
from chatlearn_agents.tool_environment import ToolEnvironment
from chatlearn_chat import ChatTemplateRenderer
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import Prompt
from chatlearn_hf.tiny import build_tiny_tokenizer
from chatlearn_testing.published_templates import published_template

QUESTION = {"role": "user", "content": "what is 1 + 1?"}
AGAIN = "wrong, try again"
CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA = ("<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>")
DEEPSEEK = ("<bos>", "<｜end▁of▁sentence｜>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<｜User｜>", "<｜Assistant｜>",
               "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
               "<｜tool▁sep｜>")  # fmt: skip
"""Added tokens of these models that decoding keeps."""
XML_CALL = "<tool_call>\n<function=calculator>\n<parameter=expression>\n1 + 1\n</parameter>\n</function>\n</tool_call>"
JSON_CALL = '{"name": "calculator", "arguments": {"expression": "1 + 1"}}'


@dataclass(frozen=True)
class Form:
    """A published chat template, the tokens of its model, and a conversation with a policy that has learned it."""

    file: str
    special: tuple[str, ...]
    eos: str
    """The token that the policy ends a turn with."""
    turns: tuple[Any, ...]
    between: tuple[str, ...]
    """What the template writes between the turns, behind the token that ended one."""
    strips: tuple[str, ...] = ()
    """What the template leaves out of earlier turns when it renders them again."""


def chatml(role: str, content: str, thought: str = "") -> str:
    return f"\n<|im_start|>{role}\n{content}<|im_end|>\n<|im_start|>assistant\n{thought}"


def llama(role: str, content: str) -> str:
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    return f"{head.format(role)}{content}<|eot_id|>{head.format('assistant')}"


THINKS = ("<think>so</think>three", "four", "2")
FINAL = ("<|channel|>", "final", "<|message|>")
USER_TURNS = {
    "qwen2.5": Form("qwen2_5", CHATML, "<|im_end|>", ("three", "four", "2"), (chatml("user", AGAIN),) * 2),
    "qwen3": Form(
        "qwen3", CHATML, "<|im_end|>", THINKS, (chatml("user", AGAIN),) * 2, strips=("<think>so</think>",)
    ),
    "llama3": Form(
        "llama3", LLAMA, "<|eot_id|>", (" three is it", "four", "2"), (llama("user", AGAIN),) * 2, strips=(" ",)
    ),
    "gemma": Form(
        "gemma", GEMMA, "<end_of_turn>", ("three", "four", "2"),
        (f"\n<start_of_turn>user\n{AGAIN}<end_of_turn>\n<start_of_turn>model\n",) * 2,
    ),
    "gemma3": Form(
        "gemma3", GEMMA, "<end_of_turn>", ("three", "four", "2"),
        (f"\n<start_of_turn>user\n{AGAIN}<end_of_turn>\n<start_of_turn>model\n",) * 2,
    ),
    "deepseek-v3": Form(
        "deepseekv3", DEEPSEEK, "<｜end▁of▁sentence｜>", ("so</think>three", "four", "2"),
        (f"<｜User｜>{AGAIN}<｜Assistant｜><think>\n",) * 2, strips=("so</think>",),
    ),
    "gpt-oss": Form(
        "gptoss", HARMONY, "<|return|>",
        (
            ("<|channel|>", "analysis", "<|message|>", "so", "<|end|>", "<|start|>", "assistant", *FINAL, *"three"),
            (*FINAL, *"four"),
            (*FINAL, "2"),
        ),
        (f"<|start|>user<|message|>{AGAIN}<|end|><|start|>assistant",) * 2,
        strips=("<|channel|>analysis<|message|>so<|end|>", "<|return|>"),
    ),
    "glm-4.5": Form(
        "glm4moe", GLM, "<|user|>", ("\n<think>so</think>\nthree", "\n<think></think>\nfour", "\n<think></think>\n2"),
        (f"\n{AGAIN}<|assistant|>",) * 2, strips=("<think>so</think>",),
    ),
}  # fmt: skip
TOOL_TURNS = {
    "qwen2.5": Form(
        "qwen2_5", CHATML, "<|im_end|>", (f"<tool_call>\n{JSON_CALL}\n</tool_call>", "it is 2"),
        (chatml("user", "\n<tool_response>\n2\n</tool_response>").replace("user\n\n", "user\n"),),
    ),
    "qwen3": Form(  # it keeps the thoughts of the turns behind the user's last message
        "qwen3", CHATML, "<|im_end|>",
        (f"<think>\na <tool_call> is best\n</think>\n\n<tool_call>\n{JSON_CALL}\n</tool_call>", "it is 2"),
        (chatml("user", "<tool_response>\n2\n</tool_response>"),),
    ),
    "qwen3.6": Form(
        "qwen3_6", CHATML, "<|im_end|>", (f"so\n</think>\n\n{XML_CALL}", "it is 2"),
        (chatml("user", "<tool_response>\n2\n</tool_response>", "<think>\n"),),
    ),
    "nemotron-3": Form(
        "nemotron_3_nano", CHATML, "<|im_end|>", (f"so\n</think>\n{XML_CALL}\n", "it is 2"),
        (chatml("user", "<tool_response>\n2\n</tool_response>\n", "<think>\n"),),
    ),
    "llama3.2": Form(
        "llama3_2", LLAMA, "<|eot_id|>", (JSON_CALL.replace("arguments", "parameters"), "it is 2"),
        (llama("ipython", '"2"'),),
    ),
    "deepseek-v3": Form(
        "deepseekv3", DEEPSEEK, "<｜end▁of▁sentence｜>",
        (
            "so</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n"
            '```json\n{"expression": "1 + 1"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "it is 2",
        ),
        ("<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>2<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",),
    ),
    "gpt-oss": Form(
        "gptoss", HARMONY, "<|return|>",
        (
            ("<|channel|>", "analysis", "<|message|>", "so", "<|end|>", "<|start|>", "assistant", "<|channel|>",
             "commentary to=functions.calculator ", "<|constrain|>", "json", "<|message|>",
             '{"expression": "1 + 1"}', "<|call|>"),
            (*FINAL, "it is 2"),
        ),
        ('<|start|>functions.calculator to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant',),
        strips=("<|channel|>analysis<|message|>so<|end|>",),
    ),
    "glm-4.5": Form(
        "glm4moe", GLM, "<|user|>",
        (
            ("\n<think>so</think>\n<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>1 + 1</arg_value>\n"
             "</tool_call>", "<|observation|>"),
            "\n<think></think>\nit is 2",
        ),
        ("\n<tool_response>\n2\n</tool_response><|assistant|>",),
    ),
}  # fmt: skip


def tokenizer_of(form: Form) -> Any:
    """Bytes with merges of common words, and the model's control tokens."""
    corpus = ["what is 1 + 1? wrong, try again three four four user assistant final analysis model so it is"] * 20
    tokenizer = build_tiny_tokenizer(400, corpus)
    tokenizer.add_special_tokens({"additional_special_tokens": list(form.special)})
    tokenizer.add_tokens(list(NOT_SPECIAL))
    tokenizer.eos_token = form.eos
    tokenizer.bos_token = "<bos>" if "<bos>" in form.special else None
    tokenizer.chat_template = published_template(form.file)
    return tokenizer


def written(tokenizer: Any, turn: str | tuple[str, ...], eos: str) -> list[int]:
    """The ids that the policy samples, letter by letter but for the control tokens."""
    parts = letters(tokenizer, turn)
    ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]
    ended = parts[-1] in ("<|call|>", "<|observation|>")
    return ids if ended else [*ids, tokenizer.convert_tokens_to_ids(eos)]


def letters(tokenizer: Any, turn: str | Sequence[str]) -> tuple[str, ...]:
    pieces = [turn] if isinstance(turn, str) else turn
    known = re.compile("|".join(re.escape(token) for token in tokenizer.get_added_vocab()) + "|.", re.DOTALL)
    return tuple(part for piece in pieces for part in known.findall(piece))


async def played_with(form: Form, environment: Any, plays: Any, tools: Sequence[Any] = ()) -> Any:
    """Play, and check the rollout's tokens against those that the engine saw and sampled."""
    tokenizer = tokenizer_of(form)
    rendered = ChatTemplateRenderer(tokenizer).prompt([QUESTION])
    prompt = Prompt("p", rendered.token_ids, rendered.text, messages=(QUESTION,), ground_truth="2")
    turns = [letters(tokenizer, turn) for turn in form.turns]
    played = await plays(environment, tokenizer, turns, prompt=prompt, ends=("<|call|>", "<|observation|>"))
    sample, asked = played.sample, played.generator.asked
    begin = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True, tools=tools or None)
    sampled = [tokenizer.decode(written(tokenizer, turn, form.eos)) for turn in form.turns]
    assert played.text == begin + "".join(a + b for a, b in zip(sampled, (*form.between, ""), strict=True))

    assert len(asked) == len(sample.turns) == len(form.turns)
    mask = np.zeros(len(sample.token_ids), bool)
    for request, turn, said in zip(asked, sample.turns, form.turns, strict=True):
        np.testing.assert_array_equal(sample.token_ids[: turn.start], request.prompt_ids, "what the engine saw")
        assert sample.token_ids[turn.start : turn.stop].tolist() == written(tokenizer, said, form.eos), "as sampled"
        mask[turn.start : turn.stop] = True
    np.testing.assert_array_equal(sample.loss_mask, mask)
    return played


def check_drift(form: Form, played: Any, messages: Sequence[Any], tools: Sequence[Any] = ()) -> None:
    """Naive: render the messages before the last turn and encode the text, as a client of a chat API does."""
    tokenizer = played.tokenizer
    naive = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True, tools=list(tools) or None
    )
    last = played.generator.asked[-1].prompt_ids
    assert tokenizer.encode(naive, add_special_tokens=False) != last.tolist(), "it drifts"
    seen = tokenizer.decode(last)
    for stripped in form.strips:
        assert stripped in seen
        assert stripped == " " or stripped not in naive
    if form.strips:
        assert naive != seen


@pytest.mark.parametrize("name", USER_TURNS)
async def test_turns_of_the_user(name: str, plays: Any) -> None:
    form = USER_TURNS[name]
    environment = CorrectionEnvironment(CorrectionOptions(message=AGAIN), RoleContext("retry"))
    environment.setup()
    played = await played_with(form, environment, plays)
    assert played.rollout.reward.components == {"accuracy": 1.0, "first_attempt": 0.0}
    said = [
        played.tokenizer.decode(played.sample.token_ids[turn.start : turn.stop - 1]) for turn in played.sample.turns
    ]
    again = {"role": "user", "content": AGAIN}
    contents = ["three", "four"] if name == "gpt-oss" else said
    messages = [QUESTION, {"role": "assistant", "content": contents[0]}, again,
                {"role": "assistant", "content": contents[1]}, again]  # fmt: skip
    check_drift(form, played, messages)


@pytest.mark.parametrize("name", TOOL_TURNS)
async def test_turns_of_tools(name: str, plays: Any, caplog: pytest.LogCaptureFixture) -> None:
    form = TOOL_TURNS[name]
    environment = ToolEnvironment(ToolsOptions(tools=("calculator",)), RoleContext("tools"))
    try:
        environment.setup()
        tools = environment._toolbox.for_template()
        with caplog.at_level(logging.WARNING):
            played = await played_with(form, environment, plays, tools)
    finally:
        environment.close()
    assert played.count("tool_calls") == 1
    assert played.count("malformed_calls") == played.count("bad_arguments") == played.count("tool_errors") == 0
    # DeepSeek's template ignores the tools that it is given.
    assert ("does not write the tools" in caplog.text) == (name == "deepseek-v3")
    arguments: Any = {"expression": "1 + 1"}
    call = {"name": "calculator", "arguments": '{"expression": "1 + 1"}' if name == "deepseek-v3" else arguments}
    calling = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "0", "function": call}]}
    result = {"role": "tool", "content": "2", "name": "calculator", "tool_call_id": "0"}
    check_drift(form, played, [QUESTION, calling, result], tools)


@pytest.mark.parametrize(
    ("file", "special", "eos"),
    [
        ("llama3", LLAMA, "<|eot_id|>"), ("gemma3", GEMMA, "<end_of_turn>"),
        ("gemma4_v5", ("<bos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>"), "<turn|>"),
        ("lfm2_v2", ("<bos>", *CHATML, "<|tool_call_start|>", "<|tool_call_end|>"), "<|im_end|>"),
        ("cohere2", ("<bos>", "<|END_OF_TURN_TOKEN|>"), "<|END_OF_TURN_TOKEN|>"),
        ("muse_glimmer", ("<|start|>", "<|message|>", "<|eot|>"), "<|eot|>"),
    ],
)  # fmt: skip
async def test_calls_in_an_unknown_format_are_refused(file: str, special: Any, eos: str, plays: Any) -> None:
    environment = ToolEnvironment(ToolsOptions(tools=("calculator",)), RoleContext("tools"))
    environment.setup()
    try:
        with pytest.raises(ConfigError, match="writes tool calls in no known format"):
            await played_with(Form(file, special, eos, ("2",), ()), environment, plays)
    finally:
        environment.close()
