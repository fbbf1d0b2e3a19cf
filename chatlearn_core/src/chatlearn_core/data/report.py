"""What became of a dataset's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from chatlearn_core.exceptions import DataError

_SHOWN = 5
"""Bad rows and control tokens that are named; all are counted."""


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
    control_tokens: Mapping[str, int] = field(default_factory=dict)
    """Control token -> rows whose text spells it."""
    num_control_rows: int = 0
    """Rows that spell any of them."""
    control_token_policy: str = "text"
    """What became of them: see ``data.control_tokens``."""

    @property
    def is_notable(self) -> bool:
        """Whether not every row became an example as it stands."""
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
    """In how many rows control tokens are spelled, which, and what becomes of them."""
    most = sorted(tokens.items(), key=lambda item: -item[1])[:_SHOWN]
    names = ", ".join(f"{token} in {count}" for token, count in most)
    fate = {"text": "encoded as text", "special": "taken as tokens", "refuse": "refused"}[policy]
    return f"control tokens are spelled in {num_spelling} of {num_rows} rows ({names}): {fate} (data.control_tokens)"


def bad_rows_error(bad_rows: list[str], path: str, num_rows: int) -> DataError:
    """The error about rows that cannot be used: the first few in full, all counted."""
    shown = "\n".join(f"  {row}" for row in bad_rows[:_SHOWN])
    more = f"\n  ... and {len(bad_rows) - _SHOWN} more" if len(bad_rows) > _SHOWN else ""
    if len(bad_rows) == num_rows:
        remedy = "There is no other row: see that path, format and options of the dataset are meant"
    else:
        remedy = "Correct them, or set data.on_bad_row=skip to leave them out (named and counted)"
    return DataError(f"{len(bad_rows)} of {num_rows} rows of '{path}' cannot be used:\n{shown}{more}\n  {remedy}.")
