"""Rendering of conversations as tokens of one model: prompts, and completions to imitate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from chatlearn_core.exceptions import DataError
from chatlearn_core.types import TokenIds

ControlTokenPolicy = Literal["text", "special", "refuse"]
"""Treatment of control tokens spelled out in the data: as ordinary text, as the tokens themselves, or as an error."""


@dataclass(slots=True, frozen=True)
class RenderedPrompt:
    """A prompt as text and tokens."""

    text: str
    token_ids: TokenIds
    """[P]"""
    messages: tuple[Mapping[str, Any], ...]
    """Chat messages; empty if the dataset row held a plain string and there is no system prompt."""


@dataclass(slots=True, frozen=True)
class RenderedDemonstration:
    """A prompt and the tokens after it, some of which are imitated."""

    prompt: RenderedPrompt
    completion_ids: TokenIds
    """[C]"""
    loss_mask: npt.NDArray[np.bool_]
    """[C] True where the token is imitated."""


class TooLongError(DataError):
    """A text is certainly too long; it was not tokenised to find its exact length."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"it has {at_least} tokens or more")
        self.at_least = at_least


class PromptRenderer(Protocol):
    """Renders prompts the same way throughout a run. Made by ``ModelFamily.renderer``."""

    @property
    def control_tokens(self) -> ControlTokenPolicy:
        """The policy that it was made with.

        Called: when rows are read; in the driver; any number of times.
        """

    @property
    def end_of_turn_id(self) -> int | None:
        """Id of the token with which the chat template ends the assistant's turn; None if there is no template or no
        such token.

        Called: when a run is assembled; in the driver; once.
        """

    def spelled_control_tokens(self, *texts: Any) -> tuple[str, ...]:
        """The control tokens spelled out in prompts and completions, each listed once.

        Called: for each row; in the driver; once per row.
        """

    def prompt(self, prompt: str | Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> RenderedPrompt:
        """Render one prompt; the template offers it the tools.

        Called: for each row, and each question to a judge; in the driver, and each worker of a reward; once per row
        or question.

        Raises:
            TooLongError: the prompt is certainly longer than the run accepts.
            DataError: the prompt is empty or malformed; the message holds only the reason.
        """

    def demonstration(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        completion: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        imitates_prompt: bool = False,
    ) -> RenderedDemonstration:
        """Render a prompt and a completion to imitate.

        Called: for each row with completions; in the driver; once per completion.

        Args:
            completion: a text, or messages whose assistant turns are imitated except those with ``weight: 0``.
            tools: passed to the template.
            imitates_prompt: also imitate the assistant's turns in the prompt. The part before the first imitated turn
                becomes the demonstration's prompt.

        Raises:
            TooLongError: the text is certainly longer than the run accepts.
            DataError: there is nothing to imitate, or a message is malformed; the message holds only the reason.
        """
