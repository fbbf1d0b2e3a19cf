"""Dataset formats: the interpretation of a file's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from chatlearn_core.exceptions import DataError
from chatlearn_core.types import Media

Row = Mapping[str, Any]
"""One row of a file: column -> value."""
Message = Mapping[str, Any]
"""One message of a chat: ``role``, ``content``, and other keys that the chat template reads."""


Content = str | Sequence[Message]
"""A text, or messages."""


@dataclass(slots=True, frozen=True)
class RawExample:
    """The content of one row, before anything is rendered or tokenised."""

    prompt: Content
    completion: Content | None = None
    """The completion to imitate, if the row has one: text, or messages that continue the prompt, of which the
    assistant's are imitated."""
    ground_truth: Any = None
    """The answer that a reward compares with; None if the row has none."""
    data_source: str | None = None
    """None means the dataset's name."""
    id: str | None = None
    """None means dataset name and row number."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns that the format did not use, passed on to rewards."""
    imitates_prompt: bool = False
    """Whether the assistant's turns in the prompt are imitated, too."""
    tools: Sequence[Any] = ()
    """Descriptions of functions that the assistant may call, for the chat template."""
    completions: Sequence[Content] = ()
    """Completions to compare, if the row has them: several of one prompt, or a single one with a label."""
    ranks: Sequence[float] = ()
    """One per entry of ``completions``, larger is better: scores, or 1 for the chosen and 0 for the rejected one."""
    labels: Sequence[bool] = ()
    """Instead of ``ranks``: whether each entry of ``completions`` is good."""
    media: Sequence[Media] = ()
    """The media that the prompt refers to, in order."""


class DatasetFormat(Protocol):
    """Interprets rows. Built as ``factory(options)`` from a ``DatasetSpec``; pure and stateless.

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
        """Columns searched for a ground truth; listed in the error for a row that has none.

        Called: when a row has no answer; in the driver; any number of times.
        """

    @property
    def completion_columns(self) -> tuple[str, ...]:
        """Columns searched for a completion; listed in the error for a row that has none.

        Called: when a row has no completion; in the driver; any number of times.
        """

    @property
    def answer_required(self) -> bool:
        """Whether a prompt without a ground truth is a bad row.

        Called: for each row without an answer; in the driver; any number of times.
        """

    def parse(self, row: Row) -> RawExample:
        """Interpret ``row``.

        Called: for each row of a file; in the driver; once per row.

        Raises:
            DataError: the row is malformed; give only the reason, because the pipeline adds file and line.
        """


def parse_row(row_format: DatasetFormat, row: Row) -> RawExample:
    """Interpret ``row`` with a format, turning any exception into a DataError.

    Raises:
        DataError: the row is malformed; holds only the reason.
    """
    try:
        return row_format.parse(row)
    except DataError:
        raise
    except Exception as error:  # a format is third-party code and may raise anything on an unusual row
        raise DataError(f"the format raised {type(error).__name__}: {error}") from error
