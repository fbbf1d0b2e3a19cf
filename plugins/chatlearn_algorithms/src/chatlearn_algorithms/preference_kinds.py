"""The two kinds of preference data that algorithms learn from: ranked completions and labelled completions.

Rows that lack what the algorithm needs are bad rows (``data.on_bad_row``): an error names their file and line, or they
are counted.
"""

from __future__ import annotations

from dataclasses import replace

from chatlearn_algorithms.example_kinds import Preferences
from chatlearn_core.data.example_kind import RowRenderer
from chatlearn_core.data.format import RawExample
from chatlearn_core.exceptions import DataError
from chatlearn_core.types import Preference


class RankedCompletions(Preferences):
    """Completions of one prompt, some better than others."""

    def build(self, raw: RawExample, row: RowRenderer) -> Preference:
        """The prompt and its ranked completions."""
        if raw.labels and not raw.ranks:
            raise DataError(
                "completions with labels, but this algorithm compares completions of one prompt and needs ranks. Take"
                " a "
                "format with 'chosen' and 'rejected' or with ranks, or algorithm kto, which learns from labels"
            )
        return super().build(raw, row)


class LabelledCompletions(Preferences):
    """Single completions that are good or bad. In a pair, the chosen one is good and the rejected one bad."""

    def build(self, raw: RawExample, row: RowRenderer) -> Preference:
        """The prompt and its labelled completions."""
        example = super().build(raw, row)
        if example.labels:
            return example
        if len(set(example.ranks)) > 2:
            raise DataError(
                f"{len(set(example.ranks))} different ranks, which do not say which completions are good; give"
                " labels (true or false), or two ranks"
            )
        best = max(example.ranks)
        return replace(example, ranks=(), labels=tuple(rank == best for rank in example.ranks))
