"""Renders conversations with the kit's character tokenizer: text as it is, messages as ``[role]content``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from chatlearn_core.data.format import Content
from chatlearn_core.exceptions import DataError
from chatlearn_core.protocols.prompt_renderer import RenderedDemonstration, RenderedPrompt
from chatlearn_testing.fakes.tokenizer import EOS


class CharacterRenderer:
    """Implements ``PromptRenderer``; every turn of the assistant ends with the end-of-sequence token."""

    control_tokens: Literal["text"] = "text"
    end_of_turn_id: int | None = EOS

    def spelled_control_tokens(self, *texts: Any) -> tuple[str, ...]:
        """None: every character is text."""
        return ()

    def prompt(self, prompt: Content, tools: Sequence[Any] = ()) -> RenderedPrompt:
        """Render a prompt. Raises: DataError: it is empty."""
        if not prompt:
            raise DataError("the prompt is empty")
        if isinstance(prompt, str):
            return RenderedPrompt(prompt, _ids(prompt), ())
        text = "".join(map(_turn, prompt)) + "[assistant]"
        return RenderedPrompt(text, _ids(text), tuple(prompt))

    def demonstration(
        self, prompt: Content, completion: Content, *, tools: Sequence[Any] = (), imitates_prompt: bool = False
    ) -> RenderedDemonstration:
        """Render a prompt and what follows it. Raises: DataError: there is nothing to imitate."""
        if not completion:
            raise DataError("the completion is empty")
        if imitates_prompt and not isinstance(prompt, str):
            first = next((i for i, message in enumerate(prompt) if message["role"] == "assistant"), len(prompt))
            answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else [*completion]
            prompt, completion = prompt[:first], [*prompt[first:], *answer]
        shown = self.prompt(prompt, tools)
        if isinstance(completion, str):
            ids = np.append(_ids(completion), EOS)
            return RenderedDemonstration(shown, ids, np.ones(len(ids), np.bool_))
        ids, mask = np.zeros(0, np.int64), np.zeros(0, np.bool_)
        for number, message in enumerate(completion):
            imitated = message["role"] == "assistant"
            opening = "" if number == 0 and imitated else f"[{message['role']}]"
            text = np.append(_ids(message["content"]), EOS) if imitated else _ids(message["content"])
            ids = np.concatenate([ids, _ids(opening), text])
            mask = np.concatenate([mask, np.zeros(len(opening), np.bool_), np.full(len(text), imitated)])
        if not mask.any():
            raise DataError("the completion has no turn of the assistant")
        return RenderedDemonstration(shown, ids, mask)


def _turn(message: Mapping[str, Any]) -> str:
    return f"[{message['role']}]{message['content']}"


def _ids(text: str) -> Any:
    return np.array([ord(character) for character in text], np.int64)
