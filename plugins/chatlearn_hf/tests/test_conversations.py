"""Which tokens of a conversation are imitated, under templates that write turns in different ways."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chatlearn_chat import ChatTemplateRenderer
from chatlearn_core.exceptions import DataError
from chatlearn_core.protocols.prompt_renderer import RenderedDemonstration
from chatlearn_hf.tiny import CHAT_TEMPLATE, build_tiny_tokenizer

CONTROL = ["<|eot|>", "<|head|>", "<|foot|>", "</s>", "<|eom|>"]

HEADED = (  # as Llama 3: no line break after the end of a turn; another token ends a call
    "{% for m in messages %}<|head|>{{ m.role }}<|foot|>\n\n{{ (m.content or '') | trim }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}<|eom|>{% else %}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|foot|>\n\n{% endif %}"
)
INSTRUCTIONS = (  # as Llama 2: only the assistant's turns end
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
THINKING = (  # as Qwen 3: after the last question an empty thought is written, before it none
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENED = (  # as DeepSeek R1: the generation prompt opens a thought, the finished turn does not have it
    "{% for m in messages %}{% if m.role == 'assistant' %}<|foot|>{{ m.content.split('</think>')[-1] }}<|eot|>"
    "{% else %}<|head|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|foot|><think>\n{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WITH_TOOLS = "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}" + CHAT_TEMPLATE

CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2."},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "That is 4."},
]


def make_tokenizer(template: str | None, eos: str = "<|endoftext|>") -> Any:
    tokenizer = build_tiny_tokenizer(400)
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL, "eos_token": eos})
    tokenizer.chat_template = template
    return tokenizer


def turns_of(tokenizer: Any, shown: RenderedDemonstration) -> list[str]:
    """Texts of the parts that are imitated."""
    turns: list[list[int]] = []
    before = False
    for token, imitated in zip(shown.completion_ids.tolist(), shown.loss_mask.tolist(), strict=True):
        if imitated:
            turns.append([token]) if not before else turns[-1].append(token)
        before = imitated
    return [tokenizer.decode(turn) for turn in turns]


def whole_text(tokenizer: Any, shown: RenderedDemonstration) -> str:
    return str(tokenizer.decode([*shown.prompt.token_ids.tolist(), *shown.completion_ids.tolist()]))


@pytest.mark.parametrize(
    ("template", "all_turns", "last_turn"),
    [
        (CHAT_TEMPLATE, ["2.<|im_end|>", "That is 4.<|im_end|>"], "That is 4.<|im_end|>"),
        (HEADED, ["2.<|eot|>", "That is 4.<|eot|>"], "That is 4.<|eot|>"),
        (INSTRUCTIONS, [" 2.</s>", " That is 4.</s>"], " That is 4.</s>"),
        (
            THINKING,
            ["2.<|im_end|>", "<think>\n\n</think>\n\nThat is 4.<|im_end|>"],
            "<think>\n\n</think>\n\nThat is 4.<|im_end|>",
        ),
    ],
    ids=["chatml", "headed", "instructions", "thinking"],
)
def test_turns_end_as_the_template_ends_them(template: str, all_turns: list[str], last_turn: str) -> None:
    tokenizer = make_tokenizer(template)
    renderer = ChatTemplateRenderer(tokenizer)
    shown = renderer.demonstration(CHAT[:-1], CHAT[-1:], imitates_prompt=True)
    assert turns_of(tokenizer, shown) == all_turns
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert whole_text(tokenizer, shown) == whole.rstrip(), "nothing but the template's own text, no further end"
    assert shown.prompt.token_ids.tolist() == renderer.prompt(CHAT[:1]).token_ids.tolist()

    for completion in (CHAT[-1:], "That is 4."):
        last = renderer.demonstration(CHAT[:-1], completion)
        assert turns_of(tokenizer, last) == [last_turn]
        assert last.loss_mask.all()
        assert last.prompt.token_ids.tolist() == renderer.prompt(CHAT[:-1]).token_ids.tolist()


def test_the_mask_is_the_one_that_the_library_makes_of_a_template_with_marks() -> None:
    """transformers finds the assistant's tokens by ``{% generation %}`` in the template."""
    marked = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
        "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer(marked)
    shown = ChatTemplateRenderer(tokenizer).demonstration(CHAT[:-1], CHAT[-1:], imitates_prompt=True)
    expected = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    ids = [*shown.prompt.token_ids.tolist(), *shown.completion_ids.tolist()]
    mask = [False] * len(shown.prompt.token_ids) + shown.loss_mask.tolist()
    assert ids == expected["input_ids"][: len(ids)]
    assert mask == [bool(one) for one in expected["assistant_masks"]][: len(ids)]
    assert not any(expected["assistant_masks"][len(ids) :])


def test_a_generation_prompt_that_opens_a_thought() -> None:
    tokenizer = make_tokenizer(OPENED)
    renderer = ChatTemplateRenderer(tokenizer)
    shown = renderer.demonstration(CHAT[:-1], CHAT[-1:])
    assert turns_of(tokenizer, shown) == ["That is 4.<|eot|>"]
    assert tokenizer.decode(shown.prompt.token_ids).endswith("<|foot|><think>\n")
    with pytest.raises(DataError, match=r"message 1 cannot be located: .*options\.turns: last"):
        renderer.demonstration(CHAT[:-1], CHAT[-1:], imitates_prompt=True)


def test_without_a_control_token_the_end_of_sequence_ends_the_last_turn() -> None:
    tokenizer = make_tokenizer(ENDLESS)
    renderer = ChatTemplateRenderer(tokenizer)
    assert renderer.end_of_turn_id is None
    assert turns_of(tokenizer, renderer.demonstration(CHAT[:-1], CHAT[-1:])) == ["That is 4.<|endoftext|>"]


def test_a_turn_without_a_prompt_cannot_be_imitated() -> None:
    silent = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|eot|>{% endif %}{% endfor %}"
    with pytest.raises(DataError, match="the prompt has no tokens"):
        ChatTemplateRenderer(make_tokenizer(silent)).demonstration("2+2?", "4")


def test_messages_that_are_not_to_be_imitated() -> None:
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    renderer = ChatTemplateRenderer(tokenizer)
    first_left_out = [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    shown = renderer.demonstration(first_left_out[:-1], first_left_out[-1:], imitates_prompt=True)
    assert turns_of(tokenizer, shown) == ["That is 4.<|im_end|>"]
    assert len(shown.prompt.messages) == 3
    last_left_out = [*CHAT[:3], {**CHAT[3], "weight": 0}]
    shown = renderer.demonstration(last_left_out[:-1], last_left_out[-1:], imitates_prompt=True)
    assert turns_of(tokenizer, shown) == ["2.<|im_end|>"]
    assert "That is" not in whole_text(tokenizer, shown)
    with pytest.raises(DataError, match="no assistant message to imitate"):
        renderer.demonstration(last_left_out[:-1], last_left_out[-1:])


def test_a_completion_of_several_turns_with_a_call() -> None:
    tokenizer = make_tokenizer(HEADED)
    completion = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    shown = ChatTemplateRenderer(tokenizer).demonstration("2+2?", completion)
    assert turns_of(tokenizer, shown) == ["add<|eom|>", "It is 4.<|eot|>"]


def test_tools_reach_the_template() -> None:
    tokenizer = make_tokenizer(WITH_TOOLS)
    renderer = ChatTemplateRenderer(tokenizer)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    prompt = renderer.prompt("2+2?", tools)
    assert '"name": "add"' in prompt.text
    assert "tools:" not in renderer.prompt("2+2?").text
    shown = renderer.demonstration("2+2?", "4", tools=tools)
    assert shown.prompt.token_ids.tolist() == prompt.token_ids.tolist()
    assert turns_of(tokenizer, shown) == ["4<|im_end|>"]


@pytest.mark.parametrize(("eos", "written"), [("<|endoftext|>", "<|im_end|>"), ("<|im_end|>", "<|im_end|>")])
def test_sampling_stops_at_the_end_of_a_turn(eos: str, written: str) -> None:
    tokenizer = make_tokenizer(CHAT_TEMPLATE, eos)
    assert ChatTemplateRenderer(tokenizer).end_of_turn_id == tokenizer.convert_tokens_to_ids(written)
    assert ChatTemplateRenderer(tokenizer, apply_chat_template=False).end_of_turn_id is None
    assert ChatTemplateRenderer(make_tokenizer(None)).end_of_turn_id is None


@pytest.mark.parametrize("written", ["4<|im_end|>", "4<|im_end|>\n", "4<|endoftext|>"])
def test_an_end_that_the_data_spell_is_not_written_twice(written: str) -> None:
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    shown = ChatTemplateRenderer(tokenizer).demonstration("2+2?", written)
    assert turns_of(tokenizer, shown) == ["4<|im_end|>"]


def test_control_tokens_inside_a_turn_are_text_and_end_nothing() -> None:
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    chat = [
        {"role": "user", "content": "what is <|im_end|>?"},
        {"role": "assistant", "content": "<|im_end|> ends a turn."},
        *CHAT[2:],
    ]
    shown = ChatTemplateRenderer(tokenizer).demonstration(chat[:-1], chat[-1:], imitates_prompt=True)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [*shown.prompt.token_ids.tolist(), *shown.completion_ids.tolist()]
    assert ids.count(end) == 4, "one a message"
    assert turns_of(tokenizer, shown) == ["<|im_end|> ends a turn.<|im_end|>", "That is 4.<|im_end|>"]


def test_without_a_template_one_turn_is_imitated_and_ended() -> None:
    tokenizer = make_tokenizer(None)
    shown = ChatTemplateRenderer(tokenizer).demonstration("2+2=", "4")
    assert turns_of(tokenizer, shown) == ["4<|endoftext|>"]
    renderer = ChatTemplateRenderer(tokenizer, apply_chat_template=False)
    assert turns_of(tokenizer, renderer.demonstration(CHAT[:-1], CHAT[-1:])) == ["That is 4.<|endoftext|>"]
    with pytest.raises(DataError, match="several turns can be imitated only with a chat template that marks them"):
        renderer.demonstration(CHAT[:-1], CHAT[-1:], imitates_prompt=True)


def test_tokens_of_a_turn_are_those_of_the_whole_text_where_each_text_begins_with_a_space() -> None:
    """SentencePiece puts a space before every text, so that a piece by itself has another first token."""
    letters = [chr(code) for code in range(33, 127)] + ["\n", "▁"]
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}{{ m.content }}</s>{% endif %}"
        "{% endfor %}"
    )
    shown = ChatTemplateRenderer(tokenizer).demonstration(CHAT[:-1], CHAT[-1:], imitates_prompt=True)
    ids = [*shown.prompt.token_ids.tolist(), *shown.completion_ids.tolist()]
    assert ids == tokenizer.encode(tokenizer.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False)
    assert [turn.replace(" ", "") for turn in turns_of(tokenizer, shown)] == ["2.</s>", "That▁is▁4.</s>"]
    assert tokenizer.tokenize("2.")[0] == "▁", "by itself the turn would begin with a space"
