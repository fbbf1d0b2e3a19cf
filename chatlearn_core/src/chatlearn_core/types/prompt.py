"""A prompt: one problem, tokenised once, with what a reward needs to judge an answer."""

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
    """An image, a video or a sound that a prompt refers to. The core carries it and never looks inside.

    Example: ``Media("image", b"\\x89PNG...")``
    """

    kind: str
    """As generator and trainer plugins name it: ``image``, ``video``, ``audio``."""
    content: Any
    """Bytes, an array, or a path or URL that every worker can read."""


@pickled_by_position
@dataclass(slots=True, frozen=True, eq=False)
class Prompt:
    """One problem. The simplest kind of ``Example``: it is its own prompt.

    ``id`` is unique over all datasets of a run and stable between runs of the same data.
    """

    id: str
    token_ids: TokenIds
    """[P] the prompt as the policy sees it, generation prompt included."""
    text: str
    """The rendered prompt that ``token_ids`` encodes."""
    data_source: str = ""
    """Name of the dataset; rewards are routed by it."""
    ground_truth: Any = None
    messages: tuple[Mapping[str, Any], ...] = ()
    """The chat messages, empty if the dataset held a plain string."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row, by name (``extra_info`` included)."""
    media: tuple[Media, ...] = ()
    """What the tokens refer to, in their order."""

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
