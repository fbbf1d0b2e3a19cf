"""Whole rollouts with the forms of well-known chat templates: what is trained on is what the engine saw.

The templates imitate the published ones: their control tokens, the ends of their turns, and what they change in earlier
turns. The policy writes letter by letter, as it may sample and as no tokenizer encodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from chatlearn_agents.correction_environment import CorrectionEnvironment
from chatlearn_agents.options import CorrectionOptions
from chatlearn_chat import ChatTemplateRenderer
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import Prompt
from chatlearn_hf.tiny import build_tiny_tokenizer

QUESTION = {"role": "user", "content": "what is 1 + 1?"}
AGAIN = "wrong, try again"


@dataclass(frozen=True)
class Form:
    """A chat template, what a policy writes with it, and the conversation that results, as the template's author
    meant it."""

    template: str
    eos: str
    """The token that the policy ends its turns with."""
    special: tuple[str, ...]
    turns: tuple[Any, ...]
    text: str
    strips: str = ""
    """What the template leaves out of earlier turns."""


FORMS = {
    "qwen3": Form(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] | trim }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
        ("<|im_start|>", "<|im_end|>"),
        ("<think>so</think>3", "4", "2"),
        "<|im_start|>user\nQUESTION<|im_end|>\n<|im_start|>assistant\n<think>so</think>3<|im_end|>\n"
        "<|im_start|>user\nAGAIN<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nAGAIN<|im_end|>\n<|im_start|>assistant\n2<|im_end|>",
        strips="<think>so</think>",
    ),
    "llama3": Form(
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|eot_id|>",
        ("<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        (" three is it", "four", "2"),
        "<bos><|start_header_id|>user<|end_header_id|>\n\nQUESTION<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n three is it<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAGAIN<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nfour<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAGAIN<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>",
        strips=" ",
    ),
    "gemma": Form(
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<end_of_turn>",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        ("three", "four", "2"),
        "<bos><start_of_turn>user\nQUESTION<end_of_turn>\n<start_of_turn>model\nthree<end_of_turn>\n"
        "<start_of_turn>user\nAGAIN<end_of_turn>\n<start_of_turn>model\nfour<end_of_turn>\n"
        "<start_of_turn>user\nAGAIN<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>",
    ),
    "deepseek": Form(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
        "<｜end▁of▁sentence｜>",
        ("<bos>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        ("<think>so</think>three", "four", "2"),
        "<bos><｜User｜>QUESTION<｜Assistant｜><think>so</think>three<｜end▁of▁sentence｜><｜User｜>AGAIN<｜Assistant｜>four"
        "<｜end▁of▁sentence｜><｜User｜>AGAIN<｜Assistant｜>2<｜end▁of▁sentence｜>",
        strips="<think>so</think>",
    ),
    "gpt-oss": Form(
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
        "<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|return|>",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
        (
            ("<|channel|>", "analysis", "<|message|>", "so", "<|end|>", "<|start|>", "assistant", "<|channel|>",
             "final", "<|message|>", "t", "h", "r", "e", "e"),
            ("<|channel|>", "final", "<|message|>", "f", "o", "u", "r"),
            ("<|channel|>", "final", "<|message|>", "2"),
        ),
        "<|start|>user<|message|>QUESTION<|end|><|start|>assistant<|channel|>analysis<|message|>so<|end|>"
        "<|start|>assistant<|channel|>final<|message|>three<|return|>"
        "<|start|>user<|message|>AGAIN<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>"
        "<|start|>user<|message|>AGAIN<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>",
        strips="<|return|>",
    ),
    "glm": Form(
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content.split('</think>')[-1] | trim }}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "<|user|>",
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"),
        ("<think>so</think>three", "four", "2"),
        "[gMASK]<sop><|user|>\nQUESTION<|assistant|>\n<think>so</think>three<|user|>\nAGAIN<|assistant|>\nfour<|user|>\nAGAIN"
        "<|assistant|>\n2<|user|>",
        strips="<think>so</think>",
    ),
}  # fmt: skip


def tokenizer_of(form: Form) -> Any:
    """Bytes with merges of common words, and the form's control tokens."""
    corpus = ["what is 1 + 1? wrong, try again three four three four user assistant final analysis model so"] * 20
    tokenizer = build_tiny_tokenizer(400, corpus)
    tokenizer.add_special_tokens({"additional_special_tokens": list(form.special)})
    tokenizer.eos_token = form.eos
    tokenizer.bos_token = "<bos>" if "<bos>" in form.special else None
    tokenizer.chat_template = form.template
    return tokenizer


@pytest.mark.parametrize("name", FORMS)
async def test_what_is_trained_on_is_what_the_engine_saw(name: str, plays: Any) -> None:
    form = FORMS[name]
    tokenizer = tokenizer_of(form)
    rendered = ChatTemplateRenderer(tokenizer).prompt([QUESTION])
    prompt = Prompt("p", rendered.token_ids, rendered.text, messages=(QUESTION,), ground_truth="2")
    environment = CorrectionEnvironment(CorrectionOptions(message=AGAIN), RoleContext("retry"))
    environment.setup()
    played = await plays(environment, tokenizer, form.turns, prompt=prompt)
    sample, asked = played.sample, played.generator.asked
    assert played.rollout.reward.components == {"accuracy": 1.0, "first_attempt": 0.0}
    wanted = form.text.replace("QUESTION", QUESTION["content"]).replace("AGAIN", AGAIN)
    assert played.text == wanted

    assert len(asked) == len(sample.turns) == 3
    mask = np.zeros(len(sample.token_ids), bool)
    for request, turn, written in zip(asked, sample.turns, form.turns, strict=True):
        np.testing.assert_array_equal(sample.token_ids[: turn.start], request.prompt_ids, "what the engine saw")
        parts = [tokenizer.encode(part, add_special_tokens=False) for part in written]
        sampled = [*(i for part in parts for i in part), tokenizer.eos_token_id]
        assert sample.token_ids[turn.start : turn.stop].tolist() == sampled, "never encoded again"
        mask[turn.start : turn.stop] = True
    np.testing.assert_array_equal(sample.loss_mask, mask)

    # Naive: render the messages so far and encode the text, as a client of a chat API does.
    answers = [tokenizer.decode(sample.token_ids[turn.start : turn.stop - 1]) for turn in sample.turns]
    again = {"role": "user", "content": AGAIN}
    messages = [QUESTION, {"role": "assistant", "content": answers[0]}, again,
                {"role": "assistant", "content": answers[1]}, again]  # fmt: skip
    naive = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    seen = tokenizer.decode(asked[2].prompt_ids)
    assert tokenizer.encode(naive, add_special_tokens=False) != asked[2].prompt_ids.tolist(), "it drifts"
    assert (naive != seen) == bool(form.strips), "in its text only where the template changes earlier turns"
    assert form.strips in seen
    if form.strips.strip():
        assert form.strips not in naive
