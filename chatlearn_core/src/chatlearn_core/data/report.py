"""The outcome of reading a dataset: rows kept, filtered and skipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from chatlearn_core.exceptions import DataError

_SHOWN = 5
"""Number of bad rows and control tokens that are listed; all are counted."""


@dataclass(slots=True, frozen=True)
class DatasetReport:
    """Rows read, kept and left out; ``num_rows`` is the sum of the other counts."""

    name: str
    path: str
    format: str
    num_rows: int
    num_examples: int
    num_filtered: int
    """Rows that are too long: the prompt alone, or prompt and completion together."""
    max_prompt_tokens: int
    """The limit that the filter applied, tokens."""
    longest_prompt_tokens: int
    """Longest prompt of all well-formed rows, including filtered ones, tokens."""
    bad_rows: tuple[str, ...] = ()
    """``place: reason`` of every row left out because ``on_bad_row`` is ``skip``."""
    control_tokens: Mapping[str, int] = field(default_factory=dict)
    """Control token -> number of rows whose text spells it out."""
    num_control_rows: int = 0
    """Number of rows that spell out any control token."""
    control_token_policy: str = "text"
    """How they were treated: see ``data.control_tokens``."""

    @property
    def is_notable(self) -> bool:
        """Whether some row was left out or spells out control tokens."""
        return bool(self.num_bad or self.num_filtered or self.num_control_rows)

    @property
    def num_bad(self) -> int:
        return len(self.bad_rows)

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.num_examples} examples of {self.num_rows} rows ({self.format}, {self.path})"]
        if self.num_filtered:
            parts.append(f"{self.num_filtered} too long (limit {self.max_prompt_tokens} prompt tokens)")
        if self.num_bad:
            parts.append(f"{self.num_bad} bad rows skipped, first: {self.bad_rows[0]}")
        if self.num_control_rows:
            policy = self.control_token_policy
            parts.append(control_tokens_text(self.num_control_rows, self.num_rows, self.control_tokens, policy))
        return "; ".join(parts)


def control_tokens_text(num_spelling: int, num_rows: int, tokens: Mapping[str, int], policy: str) -> str:
    """A sentence on the number of rows that spell out control tokens, which ones, and their treatment."""
    most = sorted(tokens.items(), key=lambda item: -item[1])[:_SHOWN]
    names = ", ".join(f"{token} in {count}" for token, count in most)
    fate = {"text": "encoded as text", "special": "taken as tokens", "refuse": "refused"}[policy]
    return f"control tokens are spelled in {num_spelling} of {num_rows} rows ({names}): {fate} (data.control_tokens)"


def bad_rows_error(bad_rows: list[str], path: str, num_rows: int) -> DataError:
    """The error about unusable rows: lists the first few and counts all."""
    shown = "\n".join(f"  {row}" for row in bad_rows[:_SHOWN])
    more = f"\n  ... and {len(bad_rows) - _SHOWN} more" if len(bad_rows) > _SHOWN else ""
    if len(bad_rows) == num_rows:
        remedy = "There is no other row: check path, format and options of the dataset"
    else:
        remedy = "Correct them, or set data.on_bad_row=skip to leave them out (named and counted)"
    return DataError(f"{len(bad_rows)} of {num_rows} rows of '{path}' cannot be used:\n{shown}{more}\n  {remedy}.")
