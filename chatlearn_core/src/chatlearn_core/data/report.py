"""What became of a dataset's rows."""

from __future__ import annotations

from dataclasses import dataclass

from chatlearn_core.exceptions import DataError

_SHOWN = 5
"""Bad rows that an error shows; all are counted."""


@dataclass(slots=True, frozen=True)
class DatasetReport:
    """Rows read, kept and left out; ``num_rows`` is the sum of the other counts."""

    name: str
    path: str
    format: str
    num_rows: int
    num_examples: int
    num_filtered: int
    """Too long: the prompt alone, or prompt and completion together."""
    max_prompt_tokens: int
    """The limit that filtered."""
    longest_prompt_tokens: int
    """Of all well-formed rows, the filtered ones included."""
    bad_rows: tuple[str, ...] = ()
    """``place: reason`` of every row left out because ``on_bad_row`` is ``skip``."""

    @property
    def num_bad(self) -> int:
        return len(self.bad_rows)

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.num_examples} examples of {self.num_rows} rows ({self.format}, {self.path})"]
        if self.num_filtered:
            parts.append(f"{self.num_filtered} too long (limit {self.max_prompt_tokens} prompt tokens)")
        if self.num_bad:
            parts.append(f"{self.num_bad} bad rows skipped, first: {self.bad_rows[0]}")
        return "; ".join(parts)


def bad_rows_error(bad_rows: list[str], path: str, num_rows: int) -> DataError:
    """The error about rows that cannot be used: the first few in full, all counted."""
    shown = "\n".join(f"  {row}" for row in bad_rows[:_SHOWN])
    more = f"\n  ... and {len(bad_rows) - _SHOWN} more" if len(bad_rows) > _SHOWN else ""
    if len(bad_rows) == num_rows:
        remedy = "There is no other row: see that path, format and options of the dataset are meant"
    else:
        remedy = "Correct them, or set data.on_bad_row=skip to leave them out (named and counted)"
    return DataError(f"{len(bad_rows)} of {num_rows} rows of '{path}' cannot be used:\n{shown}{more}\n  {remedy}.")
