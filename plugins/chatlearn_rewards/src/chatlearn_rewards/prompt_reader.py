"""The messages behind the prompts of a run, which rewards show to other models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chatlearn_chat import ChatTemplateRenderer
from chatlearn_chat.prompt_messages import messages_of
from chatlearn_core.exceptions import DataError, ModelError
from chatlearn_core.types import Prompt, Sample

Messages = tuple[Mapping[str, Any], ...]


class PromptReader:
    """Finds the messages of prompts.

    A row with a plain text has only the text that the policy's chat template rendered. To render it again would give a
    model the control tokens of the policy's template as text, so the text of the row is taken out of it.

    Args:
        load_tokenizer: ``RoleContext.load_tokenizer``; called before the first prompt without messages.
        what: who asks, for errors.
    """

    def __init__(self, load_tokenizer: Callable[[], Any] | None, what: str) -> None:
        self._load_tokenizer = load_tokenizer
        self._what = what
        self._renderer: ChatTemplateRenderer | None = None
        self._is_loaded = False
        self._lock = threading.Lock()  # fast tokenizers refuse to be used by two threads at a time

    async def read(self, samples: Sequence[Sample]) -> list[Messages]:
        """The messages of each sample's prompt, in order; of a text that no chat template rendered, one of the user.

        Raises:
            DataError: a prompt has no messages, and the runtime gives no tokenizer.
            ModelError: the run's model has no tokenizer.
        """
        if all(sample.prompt.messages for sample in samples):
            return [sample.prompt.messages for sample in samples]
        return await asyncio.to_thread(self._read, [sample.prompt for sample in samples])

    def _read(self, prompts: Sequence[Prompt]) -> list[Messages]:
        with self._lock:
            found: dict[str, Messages] = {}
            for prompt in prompts:
                if prompt.id not in found:
                    found[prompt.id] = prompt.messages or self._taken_out(prompt)
            return [found[prompt.id] for prompt in prompts]

    def _taken_out(self, prompt: Prompt) -> Messages:
        if not self._is_loaded:
            if self._load_tokenizer is None:
                raise DataError(
                    f"{self._what} needs the tokenizer of the run's model to read prompt {prompt.id!r}, which has no "
                    "messages, and its runtime gives none"
                )
            tokenizer = self._load_tokenizer()
            try:
                self._renderer = ChatTemplateRenderer(tokenizer)
            except ModelError:  # a chat template that cannot render has rendered no prompt
                self._renderer = None
            self._is_loaded = True
        try:
            messages = None if self._renderer is None else messages_of(prompt, self._renderer)
        except DataError:  # the chat template refuses a single message of a user
            messages = None
        return messages or ({"role": "user", "content": prompt.text},)
