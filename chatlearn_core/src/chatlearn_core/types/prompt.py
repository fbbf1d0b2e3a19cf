"""A prompt: one tokenised problem, with the data that a reward needs to judge an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from chatlearn_core.types.pickling import pickled_by_position

TokenIds = npt.NDArray[np.int64]
"""[T] token ids."""


@pickled_by_position
@dataclass(slots=True, frozen=True, eq=False)
class Media:
    """An image, video or sound that a prompt refers to. The core passes it on and never inspects it.

    Example: ``Media("image", b"\\x89PNG...")``
    """

    kind: str
    """Name used by generator and trainer plugins: ``image``, ``video``, ``audio``."""
    content: Any
    """Bytes, an array, or a path or URL that every worker can read."""


@pickled_by_position
@dataclass(slots=True, frozen=True, eq=False)
class Prompt:
    """One problem. The simplest kind of ``Example``: its ``prompt`` is itself.

    ``id`` is unique over all datasets of a run and stable between runs on the same data.

    Example: ``Prompt("gsm8k/7", token_ids=np.array([7, 8, 9]), text="What is 2+2?", data_source="gsm8k")``
    """

    id: str
    token_ids: TokenIds
    """[P] the prompt as the policy sees it, including the generation prompt."""
    text: str
    """The rendered prompt, which ``token_ids`` encodes."""
    data_source: str = ""
    """Name of the dataset; selects the reward."""
    ground_truth: Any = None
    messages: tuple[Mapping[str, Any], ...] = ()
    """The chat messages; empty if the dataset row held a plain string and there is no system prompt."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row, by name (including ``extra_info``)."""
    media: tuple[Media, ...] = ()
    """The media that the tokens refer to, in token order."""

    @property
    def prompt(self) -> Prompt:
        """See ``Example``."""
        return self

    @property
    def num_tokens(self) -> int:
        """See ``Example``."""
        return len(self.token_ids)

    def content(self) -> tuple[bytes, ...]:
        """See ``Example``."""
        return ()
