"""Builds records of published datasets, GSM8K and MATH, from the raw files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from chatlearn_core.data.format import DatasetFormat, Row
from chatlearn_core.data.reader import RowReader, read_rows
from chatlearn_core.exceptions import DataError
from chatlearn_data.formats.gsm8k import Gsm8kFormat
from chatlearn_data.formats.math import MathFormat
from chatlearn_data.options import InstructionOptions, NoOptions
from chatlearn_data.readers.hub import HubReader
from chatlearn_data.readers.parquet import ParquetReader
from chatlearn_data.readers.text import CsvReader, JsonLinesReader, JsonReader

Recipe = Literal["gsm8k", "math"]
_FORMATS: dict[Recipe, type[Gsm8kFormat] | type[MathFormat]] = {"gsm8k": Gsm8kFormat, "math": MathFormat}
_READERS: dict[str, Callable[[NoOptions], RowReader]] = {
    ".jsonl": JsonLinesReader,
    ".json": JsonReader,
    ".csv": CsvReader,
    ".parquet": ParquetReader,
    "hub": HubReader,
}
_QUESTION: dict[Recipe, str] = {"gsm8k": "question", "math": "problem"}


@dataclass(slots=True, frozen=True)
class PreparedRow:
    """A record, or the reason why a row has none."""

    place: str
    record: dict[str, Any] | None = None
    error: str | None = None


def prepared_rows(
    recipe: Recipe, path: str, *, split: str, hub_split: str | None = None, instruction: str | None = None
) -> Iterator[PreparedRow]:
    """Yield records of a raw file, directory or hub dataset, in the format ``verifiable``, row by row.

    Args:
        recipe: which dataset it is.
        path: any dataset file: ``.jsonl``, ``.json``, ``.csv``, ``.parquet``.
        split: part of the rows' ids, and in ``extra_info``.
        hub_split: split of a hub dataset.
        instruction: instruction after the question; None uses the recipe's own.

    Raises:
        DataError: the file cannot be read.
    """
    row_format = _FORMATS[recipe](InstructionOptions(instruction=instruction))
    readers = {source: partial(reader, NoOptions()) for source, reader in _READERS.items()}
    for index, located in enumerate(read_rows(path, hub_split, readers)):
        if located.row is None:
            yield PreparedRow(located.place, error=located.error)
            continue
        try:
            yield PreparedRow(located.place, _record(recipe, row_format, located.row, split, index))
        except DataError as error:
            yield PreparedRow(located.place, error=str(error))


def _record(recipe: Recipe, row_format: DatasetFormat, row: Row, split: str, index: int) -> dict[str, Any]:
    raw = row_format.parse(row)
    question = str(row[_QUESTION[recipe]])
    if not question.strip():
        raise DataError(f"column '{_QUESTION[recipe]}' is empty")
    extra = {key: value for key, value in row.items() if key in ("level", "type", "subject")}
    return {
        "id": f"{recipe}/{split}/{index}",
        "data_source": recipe,
        "prompt": raw.prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": raw.ground_truth},
        "extra_info": {"split": split, "index": index, "question": question, "solution": raw.completion, **extra},
    }
