"""What judges, reward models and servers are shown of a prompt: its messages, without the policy's chat template."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import Sample
from chatlearn_hf.tiny import build_tiny_tokenizer
from chatlearn_rewards.judge_options import JudgeOptions
from chatlearn_rewards.judge_reward import JudgeReward
from chatlearn_rewards.prompt_reader import PromptReader
from chatlearn_testing.fakes.role_handle import ScriptedHandle

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RENDERED = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"


def load(template: str | None = TEMPLATE) -> Any:
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def with_text(sample: Sample, text: str) -> Sample:
    sample.prompt = replace(sample.prompt, text=text, messages=())
    return sample


@pytest.mark.parametrize(
    ("template", "text", "content"),
    [
        (TEMPLATE, RENDERED, "What is 2 + 2?"),
        (TEMPLATE, "2 + 2 =", "2 + 2 ="),
        (None, "2 + 2 =", "2 + 2 ="),
        ("{{ raise_exception('needs a system message') }}", "2 + 2 =", "2 + 2 ="),
    ],
    ids=["rendered", "verbatim", "without a template", "a template that refuses"],
)
def test_a_text_becomes_the_message_that_it_was(
    template: str | None, text: str, content: str, make_sample: Any
) -> None:
    loads = []

    def counted() -> Any:
        loads.append(1)
        return load(template)

    reader = PromptReader(counted, "a test")
    kept = make_sample("a", index=1)
    messages = asyncio.run(reader.read([with_text(make_sample("a"), text), kept]))
    assert messages == [({"role": "user", "content": content},), kept.prompt.messages]
    asyncio.run(reader.read([with_text(make_sample("a"), text)]))
    assert len(loads) == 1


def test_without_need_no_tokenizer_is_loaded(make_sample: Any) -> None:
    sample = make_sample("a")
    assert asyncio.run(PromptReader(None, "a test").read([sample])) == [sample.prompt.messages]


def test_a_judge_is_not_shown_the_chat_template_of_the_policy(make_sample: Any) -> None:
    handle = ScriptedHandle(lambda prompt, sampling: "Score: 1")
    context = RoleContext("reward", handles={"judge": handle}, load_tokenizer=load)
    reward = JudgeReward(JudgeOptions(template="Q {prompt} A {completion}"), context)
    reward.setup()
    [result] = asyncio.run(reward.score([with_text(make_sample("4"), RENDERED)]))
    reward.close()
    assert result.value == 1.0
    assert handle.asked[0][0] == "[user]Q What is 2 + 2? A 4[assistant]"
