"""From a raw example to tokens: chat template, verbatim text, completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chatlearn_core.data.control_tokens import ControlTokens
from chatlearn_core.data.format import Message
from chatlearn_core.data.settings import ControlTokenPolicy
from chatlearn_core.data.tokenizer import ShortestEncoding, Tokenizer
from chatlearn_core.exceptions import DataError
from chatlearn_core.types import TokenIds


@dataclass(slots=True, frozen=True)
class RenderedPrompt:
    """A prompt as text and tokens."""

    text: str
    token_ids: TokenIds
    """[P]"""
    messages: tuple[Mapping[str, Any], ...]
    """Empty if the dataset held a plain string."""


class TooLongError(DataError):
    """A text that is certainly too long, and was not tokenised to see by how much."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"it has {at_least} tokens or more")
        self.at_least = at_least


@dataclass(slots=True, frozen=True)
class PromptRenderer:
    """Renders prompts the same way for a whole run.

    With ``apply_chat_template`` messages go through the tokenizer's template with the generation prompt, and a plain
    string becomes one user message first; if the tokenizer has no template a plain string is taken verbatim and
    messages are an error. Without it, a string is taken verbatim and messages are their contents joined by blank
    lines. Verbatim text gets the special tokens that the tokenizer puts before plain text; a rendered template has
    its own.

    Control tokens that the data spells are text unless ``control_tokens`` says otherwise; a row without any has the
    ids that the tokenizer gives it.
    """

    tokenizer: Tokenizer
    apply_chat_template: bool = True
    system_prompt: str | None = None
    control_tokens: ControlTokenPolicy = "text"
    max_tokens: int | None = None
    """Texts that certainly have more tokens are not tokenised."""
    _control: ControlTokens = field(init=False, repr=False)
    _shortest: ShortestEncoding = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_control", ControlTokens(self.tokenizer))
        object.__setattr__(self, "_shortest", ShortestEncoding(self.tokenizer))

    def spelled_control_tokens(self, *texts: Any) -> tuple[str, ...]:
        """The control tokens that prompts and completions spell, each once."""
        return self._control.spelled_in(texts)

    def prompt(self, prompt: str | Sequence[Message]) -> RenderedPrompt:
        """Render one prompt.

        Raises:
            TooLongError: longer than ``max_tokens``, without doubt.
            DataError: an empty or malformed prompt; only the reason.
        """
        messages = _checked_messages(prompt)
        if isinstance(prompt, str) and not prompt.strip():
            raise DataError("the prompt is empty")
        if self.system_prompt is not None and not any(message["role"] == "system" for message in messages):
            messages = ({"role": "system", "content": self.system_prompt}, *messages)
        kept = () if isinstance(prompt, str) else messages
        if self.apply_chat_template and self.tokenizer.chat_template is not None:
            text, ids = self._chat(messages)
        elif self.apply_chat_template and kept:
            raise DataError(
                "the prompt is a chat, but the tokenizer has no chat template; use a model with one, "
                "or set data.apply_chat_template=false to join the messages' contents by blank lines"
            )
        else:
            text = "\n\n".join(_text(message) for message in messages)
            ids = self._verbatim(text)
        if not ids:
            raise DataError("the prompt has no tokens")
        return RenderedPrompt(text, np.asarray(ids, dtype=np.int64), kept)

    def completion(self, text: str) -> TokenIds:
        """[C] tokens to imitate, ended by the end-of-sequence token.

        Raises:
            DataError: an empty completion, or a tokenizer without an end-of-sequence token; only the reason.
        """
        if not text.strip():
            raise DataError("the completion is empty")
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise DataError("the tokenizer has no end-of-sequence token, so a completion cannot be ended")
        self._check_length(text)
        spelled = self._spelled(text)
        if not spelled or self.control_tokens == "special":
            ids = self._encode(text)
        else:  # the one token that ends it, written out, is meant as such
            hidden = self._control.hide(text.rstrip().removesuffix(self._eos_text()))
            ids = self._control.encode(hidden.value, hidden)
        return np.asarray([*ids, eos] if ids[-1:] != [eos] else ids, dtype=np.int64)

    def _chat(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """Text and ids of messages in the tokenizer's template."""
        text = self._template(messages)
        self._check_length(text)
        if not self._spelled(messages) or self.control_tokens == "special":
            return text, self._encode(text)
        hidden = self._control.hide(messages)
        rendered = self._template(hidden.value)
        if hidden.reveal(rendered) != text:
            names = ", ".join(hidden.spelled.values())
            raise DataError(
                f"the chat template looks at the control tokens that the messages spell ({names}), so they cannot be "
                "encoded as text; take them out, or set data.control_tokens=special if tokens are meant"
            )
        return text, self._control.encode(rendered, hidden)

    def _template(self, messages: Sequence[Message]) -> str:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs of other people and raise what they like
            raise DataError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

    def _verbatim(self, text: str) -> list[int]:
        """Ids of plain text; an end-of-sequence token that the tokenizer appends would end the prompt: dropped."""
        self._check_length(text)
        eos = self.tokenizer.eos_token_id
        if self._spelled(text) and self.control_tokens == "text":
            ids = self._control.encode_verbatim(self._control.hide(text))
            return ids[:-1] if ids and ids[-1] == eos else ids
        ids = self._encode(text, add_special_tokens=True)
        if ids and ids[-1] == eos and not text.endswith(self._eos_text()):
            return ids[:-1]
        return ids

    def _spelled(self, value: Any) -> bool:
        """Whether texts in ``value`` spell control tokens.

        Raises:
            DataError: they do, and that is to be refused.
        """
        spelled = self._control.spelled_in(value)
        if spelled and self.control_tokens == "refuse":
            raise DataError(f"the text spells control tokens ({', '.join(spelled)}), which data.control_tokens refuses")
        return bool(spelled)

    def _check_length(self, text: str) -> None:
        if self.max_tokens is not None and len(text) > self.max_tokens:
            at_least = self._shortest.num_tokens(text)
            if at_least > self.max_tokens:
                raise TooLongError(at_least)

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # several libraries, the Rust one raising bare Exception
            raise DataError(f"the tokenizer refuses the text: {type(error).__name__}: {error}") from error

    def _eos_text(self) -> str:
        eos = self.tokenizer.eos_token_id
        assert eos is not None
        return self.tokenizer.decode([eos], skip_special_tokens=False)


def _checked_messages(prompt: str | Sequence[Message]) -> tuple[Mapping[str, Any], ...]:
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, Sequence) or not prompt:
        raise DataError(f"the prompt must be a string or a non-empty list of messages, not {prompt!r:.60}")
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"message {index} of the prompt must have 'role' and 'content', not {message!r:.60}")
    messages = tuple(dict(message) for message in prompt if isinstance(message, Mapping))
    last = messages[-1]
    if last["role"] == "assistant":
        raise DataError("the prompt's last message is the assistant's, so nothing is left to generate")
    if not _text(last).strip():
        raise DataError(f"the prompt's last message ({last['role']}) is empty")
    return messages


def _text(message: Message) -> str:
    """Text of a message; content may be a string or a list of parts, of which the text parts count."""
    content = message["content"]
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    raise DataError(f"the content of a {message['role']} message must be text or a list of parts, not {content!r:.60}")
