"""What turns conversations into the tokens of one model: prompts, and completions to imitate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from chatlearn_core.exceptions import DataError
from chatlearn_core.types import TokenIds

ControlTokenPolicy = Literal["text", "special", "refuse"]
"""What control tokens become that data spell: text like any other, the tokens themselves, or an error."""


@dataclass(slots=True, frozen=True)
class RenderedPrompt:
    """A prompt as text and tokens."""

    text: str
    token_ids: TokenIds
    """[P]"""
    messages: tuple[Mapping[str, Any], ...]
    """Empty if the dataset held a plain string."""


@dataclass(slots=True, frozen=True)
class RenderedDemonstration:
    """A prompt, and what follows it, some of which is imitated."""

    prompt: RenderedPrompt
    completion_ids: TokenIds
    """[C]"""
    loss_mask: npt.NDArray[np.bool_]
    """[C] True where the token is imitated."""


class TooLongError(DataError):
    """A text that is certainly too long, and was not tokenised to see by how much."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"it has {at_least} tokens or more")
        self.at_least = at_least


class PromptRenderer(Protocol):
    """Renders prompts the same way for a whole run. ``ModelFamily.renderer`` makes it."""

    @property
    def control_tokens(self) -> ControlTokenPolicy: ...

    @property
    def end_of_turn_id(self) -> int | None:
        """Id of the token by which the chat template ends the assistant's turn; None without a template or such a
        token.
        """

    def spelled_control_tokens(self, *texts: Any) -> tuple[str, ...]:
        """The control tokens that prompts and completions spell, each once."""

    def prompt(self, prompt: str | Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> RenderedPrompt:
        """Render one prompt, with the tools that its template is to offer.

        Raises:
            TooLongError: certainly longer than the run takes.
            DataError: an empty or malformed prompt; only the reason.
        """

    def demonstration(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        completion: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        imitates_prompt: bool = False,
    ) -> RenderedDemonstration:
        """Render a prompt and a completion that is imitated.

        Args:
            completion: text, or messages of which the assistant's are imitated; one with ``weight: 0`` is not.
            tools: for the template.
            imitates_prompt: imitate the assistant's turns in the prompt as well. What stands before the first one that
                is imitated is the demonstration's prompt.

        Raises:
            TooLongError: certainly longer than the run takes.
            DataError: nothing to imitate, or a malformed message; only the reason.
        """
