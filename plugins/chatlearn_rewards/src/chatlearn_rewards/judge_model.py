"""The model that judges: a generator role, or any other object that answers conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from chatlearn_core.exceptions import DataError
from chatlearn_core.protocols import RoleHandle
from chatlearn_core.types import SamplingParams

Message = Mapping[str, str]
"""``{"role": "user", "content": "..."}``"""


class JudgeModel(Protocol):
    """Answers conversations."""

    @property
    def name(self) -> str:
        """Name under which a cache stores the answers; different models have different names."""

    @property
    def is_fixed(self) -> bool:
        """Whether the model stays the same throughout a run, so that a cache may store its answers."""

    def setup(self) -> None:
        """Load tokenizer or connections. Called once, before the first question."""

    def close(self) -> None:
        """Release everything. A repeated call does nothing."""

    async def answer(
        self, messages: Sequence[Message], sampling: SamplingParams, *, request_id: str, group_id: str
    ) -> str:
        """Return the text of the next turn.

        Raises:
            DataError: the conversation is too long for the model, or cannot be rendered.
            RoleLostError: the model cannot answer any more questions.
            BackendError: the request failed.
        """


class GeneratorJudge:
    """A generator role that answers through its own chat template."""

    def __init__(self, handle: RoleHandle) -> None:
        self._handle = handle

    @property
    def name(self) -> str:
        return self._handle.model_path

    @property
    def is_fixed(self) -> bool:
        return not self._handle.weights_change

    def setup(self) -> None:
        """Load tokenizer and chat template."""
        _ = self._handle.renderer

    def close(self) -> None:
        """Do nothing: the role does not belong to the reward."""

    async def answer(
        self, messages: Sequence[Message], sampling: SamplingParams, *, request_id: str, group_id: str
    ) -> str:
        """See ``JudgeModel``."""
        prompt = self._handle.renderer.prompt(messages)
        needed = len(prompt.token_ids) + sampling.max_tokens
        if needed > self._handle.max_length:
            raise DataError(
                f"the question has {len(prompt.token_ids)} tokens and the answer up to {sampling.max_tokens} "
                f"(max_tokens), and role {self._handle.role!r} takes {self._handle.max_length}"
            )
        completion = await self._handle.generate(prompt.token_ids, sampling, request_id=request_id, group_id=group_id)
        return completion.text
