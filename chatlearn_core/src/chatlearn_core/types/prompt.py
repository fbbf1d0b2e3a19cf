"""What a dataset row becomes before anything runs: a prompt, and for supervised data its completion."""

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
class Prompt:
    """One problem, tokenised once, with what a reward needs to judge an answer.

    ``id`` is unique over all datasets of a run and stable between runs of the same data; it keys the random numbers
    of every sample drawn for this prompt.
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


@dataclass(slots=True, frozen=True, eq=False)
class Demonstration:
    """A prompt and what follows it, to imitate (supervised fine-tuning)."""

    prompt: Prompt
    completion_ids: TokenIds
    """[C] what follows the prompt, with the tokens that end the turns that are imitated."""
    loss_mask: npt.NDArray[np.bool_] | None = None
    """[C] True where the token is imitated; None: everywhere."""


Example = Prompt | Demonstration
"""What a dataset yields. An algorithm says which of them it takes."""
