"""The model that judges: a generator role, or anything else that answers a conversation."""

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
        """What its answers are kept under: two models have two names."""

    @property
    def is_fixed(self) -> bool:
        """Whether it answers alike throughout a run, so that answers may be kept."""

    def setup(self) -> None:
        """Load what it needs. Called once, before it is asked."""

    def close(self) -> None:
        """Release everything. Twice is fine."""

    async def answer(
        self, messages: Sequence[Message], sampling: SamplingParams, *, request_id: str, group_id: str
    ) -> str:
        """The text of the next turn.

        Raises:
            DataError: the conversation is too long for it, or cannot be rendered.
            RoleLostError: it cannot work any more.
            BackendError: the request failed.
        """


class GeneratorJudge:
    """A generator role, asked through its own chat template."""

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
        """Nothing is held: the role is not the reward's."""

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
