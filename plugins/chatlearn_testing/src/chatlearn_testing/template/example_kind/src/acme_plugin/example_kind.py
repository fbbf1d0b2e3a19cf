"""The kind of examples ``acme``: a completion to imitate, and how much it counts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
from chatlearn_core.data import RawExample, RowRenderer
from chatlearn_core.exceptions import DataError
from chatlearn_core.types import ExampleDraw, Prompt, Sample, TokenIds, sample_from_tokens

COLUMN = "weight"


@dataclass(slots=True, frozen=True, eq=False)
class WeightedDemonstration:
    """Implements ``chatlearn_core.types.Example``."""

    prompt: Prompt
    completion_ids: TokenIds
    """[C] tokens after the prompt."""
    loss_mask: npt.NDArray[np.bool_]
    """[C] True where the token is imitated."""
    weight: float

    @property
    def id(self) -> str:
        """That of the prompt."""
        return self.prompt.id

    @property
    def num_tokens(self) -> int:
        """Length of prompt and completion."""
        return len(self.prompt.token_ids) + len(self.completion_ids)

    def content(self) -> Iterable[bytes]:
        """All that a checkpoint compares, besides the id and the prompt's tokens."""
        yield self.completion_ids.tobytes()
        yield self.loss_mask.tobytes()
        yield repr(self.weight).encode()


class AcmeKind:
    """Implements ``chatlearn_core.data.ExampleKind``: one sample per draw, whose weight is ``sequence_data["weight"]``."""

    def build(self, raw: RawExample, row: RowRenderer) -> WeightedDemonstration:
        """Make the example of a row. Raises: DataError: gives the reason; the caller adds file and line."""
        if raw.completion is None:
            raise DataError(f"no completion to imitate (looked in: {', '.join(row.format.completion_columns)})")
        weight = raw.columns.get(COLUMN)
        weight = 1.0 if weight is None else weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise DataError(f"column {COLUMN!r} is {weight!r:.80}; it must be a finite number above 0")
        shown = row.rendered(raw, raw.completion)
        return WeightedDemonstration(
            row.prompt(raw, shown.prompt), shown.completion_ids, shown.loss_mask, float(weight)
        )

    def samples(self, draw: ExampleDraw) -> list[Sample]:
        """Make the samples of one draw of an example."""
        example = cast(WeightedDemonstration, draw.example)
        sample = sample_from_tokens(draw, 0, example.completion_ids, example.loss_mask)
        sample.sequence_data[COLUMN] = example.weight
        return [sample]
