"""What is appended to sampled tokens, for templates in the manner of well-known models.

The expectation is the template's own rendering of the longer conversation, wherever it writes earlier turns unchanged.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chatlearn_chat import ChatTemplateRenderer
from chatlearn_core.exceptions import DataError
from chatlearn_testing.published_templates import published_template

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen: a line break follows the end of a turn; the reasoning of earlier turns is stripped."""
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
"""Llama 3: nothing follows the end; a turn with a tool call has no content."""
GLM = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>{% else %}<|{{ m.role }}|>{% endif %}"
    "{{ '\n' + m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""GLM: the token that begins the next turn ends the one before, and is sampled."""
SPECIAL = ("<bos>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "<|user|>", "<|assistant|>",
           "<|observation|>")  # fmt: skip
QUESTION = {"role": "user", "content": "one"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}


def tokenizer_of(template: str, end: str, special: tuple[str, ...] = SPECIAL) -> Any:
    """Byte by byte, but for the special tokens."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, bos_token="<bos>")
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    fast.chat_template = template
    return fast


@pytest.mark.parametrize(
    ("template", "end", "answer", "reply", "added"),
    [
        (CHATML, "<|im_end|>", "two", {"role": "user", "content": "three"},
         "\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, "<|im_end|>", "<think>so</think>two", {"role": "user", "content": "two"},
         "\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, None, "tw", {"role": "user", "content": "three"},
         "<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, "<|im_end|>", None, {"role": "tool", "content": "1<|im_end|>"},
         "\n<|im_start|>tool\n1<|im_end|><|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA, "<|eot|>", "two", {"role": "user", "content": "one"},
         "<|start|>user<|end|>\n\none<|eot|><|start|>assistant<|end|>\n\n"),
        (LLAMA, "<|eot|>", None, {"role": "tool", "content": "1"},
         "<|start|>tool<|end|>\n\n1<|eot|><|start|>assistant<|end|>\n\n"),
        (LLAMA, "<bos>", "two", {"role": "user", "content": "three"},  # ended by a token of another model
         "<|start|>user<|end|>\n\nthree<|eot|><|start|>assistant<|end|>\n\n"),
        (GLM, "<|user|>", "two", {"role": "user", "content": "three"}, "\nthree<|assistant|>"),
        (GLM, "<|observation|>", "two", {"role": "tool", "content": "1"}, "\n1<|assistant|>"),
        (GLM, None, "two", {"role": "user", "content": "three"}, "<|user|>\nthree<|assistant|>"),
    ],
)  # fmt: skip
def test_the_text_behind_a_sampled_turn(template: str, end: str | None, answer: Any, reply: Any, added: str) -> None:
    tokenizer = tokenizer_of(template, "<|im_end|>" if template == CHATML else "<|eot|>")
    turn = CALLING if answer is None else {"role": "assistant", "content": answer}
    end_id = None if end is None else tokenizer.convert_tokens_to_ids(end)
    ids = ChatTemplateRenderer(tokenizer).continuation([QUESTION, turn, reply], 1, end_id)
    assert tokenizer.decode(ids) == added
    forged = reply["content"].count("<|im_end|>")
    assert (ids == tokenizer.convert_tokens_to_ids("<|im_end|>")).sum() == added.count("<|im_end|>") - forged


@pytest.mark.parametrize(
    ("file", "special", "end", "answer", "reply", "added"),
    [
        ("gptoss", ("<|start|>", "<|message|>", "<|end|>", "<|return|>"), None, "two", "user",
         "<|end|><|start|>user<|message|>1<|end|><|start|>assistant"),
        ("glm4moe", ("<|user|>", "<|assistant|>", "<|observation|>"), None, "<think>so</think>two", "user",
         "<|user|>\n1<|assistant|>"),
        ("glm4moe", ("<|user|>", "<|assistant|>", "<|observation|>"), "<|observation|>", "<think>so</think>two", "user",
         "<|user|>\n1<|assistant|>"),
        ("glm4moe", ("<|user|>", "<|assistant|>", "<|observation|>"), None, None, "tool",
         "<|observation|>\n<tool_response>\n1\n</tool_response><|assistant|>"),
        ("phi3", ("<|user|>", "<|assistant|>", "<|end|>", "<eos>"), "<eos>", "two", "user",
         "\n<|user|>\n1<|end|>\n<|assistant|>\n"),
    ],
)  # fmt: skip
def test_templates_that_end_earlier_turns_in_another_way(
    file: str, special: Any, end: str | None, answer: Any, reply: str, added: str
) -> None:
    """Published templates, whose texts are the expectation: gpt-oss writes ``<|return|>`` only behind a last turn, GLM
    ends no turn and strips thoughts, Phi-3 appends its end of sequence to every text without a generation prompt."""
    tokenizer = tokenizer_of(published_template(file), special[-1], special)
    turn = CALLING if answer is None else {"role": "assistant", "content": answer}
    end_id = None if end is None else tokenizer.convert_tokens_to_ids(end)
    ids = ChatTemplateRenderer(tokenizer).continuation([QUESTION, turn, {"role": reply, "content": "1"}], 1, end_id)
    assert tokenizer.decode(ids) == added


def test_several_turns_and_messages() -> None:
    tokenizer = tokenizer_of(CHATML, "<|im_end|>")
    turn = {"role": "assistant", "content": "same"}
    again = {"role": "user", "content": "same"}
    messages = [QUESTION, turn, again, turn, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    renderer = ChatTemplateRenderer(tokenizer, system_prompt="Be brief.")
    end = tokenizer.eos_token_id
    prompt = renderer.prompt(messages[:1]).token_ids.tolist()
    same = tokenizer.encode("same", add_special_tokens=False)
    first = renderer.continuation(messages[:3], 1, end).tolist()
    second = renderer.continuation(messages, 3, end).tolist()
    stitched = [*prompt, *same, end, *first, *same, end, *second]
    assert stitched == renderer.prompt(messages).token_ids.tolist(), "the text encodes unambiguously here"


def test_a_text_that_follows_many_turns_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(CHATML, "<|im_end|>")
    renderer = ChatTemplateRenderer(tokenizer)
    encoded: list[str] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **settings: encoded.append(text) or encode(text, **settings))

    def behind(answer: str, reply: str, end: int | None) -> list[int]:
        turn, again = {"role": "assistant", "content": answer}, {"role": "user", "content": reply}
        return renderer.continuation([QUESTION, turn, again], 1, end).tolist()

    first = behind("two", "wrong", tokenizer.eos_token_id)
    assert behind("three", "wrong", tokenizer.eos_token_id) == first
    assert len(encoded) == 1
    assert behind("three", "wrong", None) == [tokenizer.eos_token_id, *first], "a turn that a limit ended"
    assert behind("three", "again", tokenizer.eos_token_id) != first
    for number in range(300):
        behind("two", f"no {number}", tokenizer.eos_token_id)
    assert len(renderer._replies) <= 256
    assert behind("four", "wrong", tokenizer.eos_token_id) == first


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (
            [QUESTION, {"role": "assistant", "content": "two"}, {"role": "assistant", "content": "x"}, QUESTION],
            "not the assistant's",
        ),
        ([QUESTION, {"role": "assistant", "content": "two"}], "nothing to generate"),
    ],
)
def test_nothing_follows(messages: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        ChatTemplateRenderer(tokenizer_of(CHATML, "<|im_end|>")).continuation(messages, 1, None)


def test_a_template_that_changes_turns_without_an_end_is_refused() -> None:
    template = "{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}"
    tokenizer = tokenizer_of(template, "<|im_end|>")
    messages = [QUESTION, {"role": "assistant", "content": "two"}, QUESTION]
    with pytest.raises(DataError, match="the end of the assistant's turn in message 1 cannot be located"):
        ChatTemplateRenderer(tokenizer).continuation(messages, 1, None)
