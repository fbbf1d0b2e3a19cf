from __future__ import annotations

import numpy as np
import pytest

from chatlearn_chat import ChatTemplateRenderer
from chatlearn_chat.prompt_messages import messages_of
from chatlearn_core.types import Prompt


@pytest.fixture
def renderer(tokenizer) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(tokenizer)


def prompt(text: str, messages=()) -> Prompt:
    return Prompt("p", np.array([1]), text, messages=messages)


@pytest.mark.parametrize("text", ["how much is 1 + 1?", "", "[user][assistant]"])
def test_a_plain_text_is_taken_out_of_what_the_template_rendered(renderer, text) -> None:
    assert messages_of(prompt(f"[user]{text}[assistant]"), renderer) == ({"role": "user", "content": text},)


def test_messages_of_the_row_are_kept(renderer) -> None:
    messages = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})
    assert messages_of(prompt("anything", messages), renderer) == messages


@pytest.mark.parametrize("text", ["how much is 1 + 1?", "[user]", "[user]hi"])
def test_a_text_that_was_not_rendered_has_none(renderer, text) -> None:
    assert messages_of(prompt(text), renderer) is None
