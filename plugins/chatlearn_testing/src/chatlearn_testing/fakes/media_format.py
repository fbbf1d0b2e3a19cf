"""Rows of prompts with media: ``{"prompt": "look at z", "media": ["0a1b2c"]}``, the bytes of each medium in hex."""

from __future__ import annotations

from chatlearn_core.data.format import RawExample, Row
from chatlearn_core.exceptions import DataError
from chatlearn_core.types import Media
from chatlearn_testing.fakes.options import FakeOptions


class MediaFormat:
    """Implements ``chatlearn_core.data.format.DatasetFormat``."""

    answer_columns: tuple[str, ...] = ()
    completion_columns: tuple[str, ...] = ()
    answer_required = False

    def __init__(self, options: FakeOptions) -> None:
        self.options = options

    def parse(self, row: Row) -> RawExample:
        """Convert a row to an example. Raises: DataError: a medium is empty or not in hex."""
        try:
            media = tuple(Media("image", bytes.fromhex(text)) for text in row.get("media", ()))
        except ValueError as error:
            raise DataError(f"the column media holds bytes in hex: {error}") from error
        if not all(medium.content for medium in media):
            raise DataError("a medium is empty; write at least one byte, or leave it and its placeholder out")
        return RawExample(prompt=row["prompt"], id=row.get("id"), media=media)
