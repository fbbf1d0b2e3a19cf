"""Dataset formats: what a row of a file means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from chatlearn_core.exceptions import DataError
from chatlearn_core.types import Media

Row = Mapping[str, Any]
"""One row of a file: column -> value."""
Message = Mapping[str, Any]
"""One turn of a chat: ``role``, ``content``, and whatever else the chat template reads."""


Content = str | Sequence[Message]
"""A text, or messages."""


@dataclass(slots=True, frozen=True)
class RawExample:
    """What one row says, before anything is rendered or tokenised."""

    prompt: Content
    completion: Content | None = None
    """What to imitate, where the row has it: text, or messages that continue the prompt, of which the assistant's are
    imitated."""
    ground_truth: Any = None
    """The answer that a reward compares with; None where the row has none."""
    data_source: str | None = None
    """None: the dataset's name stands in."""
    id: str | None = None
    """None: dataset name and row number stand in."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The columns that the format did not use up, passed on to rewards."""
    imitates_prompt: bool = False
    """The assistant's turns in the prompt are imitated, too."""
    tools: Sequence[Any] = ()
    """Descriptions of functions that the assistant may call, for the chat template."""
    completions: Sequence[Content] = ()
    """What is compared, where the row has it: several completions of the prompt, or a single one with a label."""
    ranks: Sequence[float] = ()
    """One for each of ``completions``, larger is better: scores, or 1 for the chosen and 0 for the rejected one."""
    labels: Sequence[bool] = ()
    """In place of ``ranks``: whether each of ``completions`` is good."""
    media: Sequence[Media] = ()
    """What the prompt refers to, in order."""


class DatasetFormat(Protocol):
    """Reads meaning into rows. Built as ``factory(options)`` from a ``DatasetSpec``; pure, holds no state.

    Example:
        class Riddles:
            answer_columns = ("solution",)
            completion_columns = ()
            answer_required = True

            def parse(self, row):
                return RawExample(prompt=row["riddle"], ground_truth=row.get("solution"))
    """

    @property
    def answer_columns(self) -> tuple[str, ...]:
        """Columns that a ground truth is looked for in; named when a row has none."""

    @property
    def completion_columns(self) -> tuple[str, ...]:
        """Columns that a completion is looked for in; named when a row has none."""

    @property
    def answer_required(self) -> bool:
        """Whether a prompt without a ground truth is a bad row."""

    def parse(self, row: Row) -> RawExample:
        """Say what ``row`` means.

        Raises:
            DataError: the row is malformed; only the reason, the pipeline adds file and line.
        """


def parse_row(row_format: DatasetFormat, row: Row) -> RawExample:
    """What ``row`` means to a format, whatever the format raises.

    Raises:
        DataError: the row is malformed; only the reason.
    """
    try:
        return row_format.parse(row)
    except DataError:
        raise
    except Exception as error:  # a format is someone else's code and may raise what it likes on an odd row
        raise DataError(f"the format raised {type(error).__name__}: {error}") from error
