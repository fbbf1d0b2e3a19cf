"""The way from data files to batches of examples: reading, formats, filtering."""

from chatlearn_core.data.example_kind import ExampleKind, RowRenderer
from chatlearn_core.data.format import Content, DatasetFormat, Message, RawExample, Row
from chatlearn_core.data.pipeline import Dataset, ExampleSet, build_dataset
from chatlearn_core.data.prompts import Prompts
from chatlearn_core.data.reader import LocatedRow, RowReader, read_rows
from chatlearn_core.data.report import DatasetReport
from chatlearn_core.data.settings import DatasetSettings, DataSettings, OnBadRow, Split
from chatlearn_core.data.tokenizer import Tokenizer

__all__ = [
    "Content",
    "DataSettings",
    "Dataset",
    "DatasetFormat",
    "DatasetReport",
    "DatasetSettings",
    "ExampleKind",
    "ExampleSet",
    "LocatedRow",
    "Message",
    "OnBadRow",
    "Prompts",
    "RawExample",
    "Row",
    "RowReader",
    "RowRenderer",
    "Split",
    "Tokenizer",
    "build_dataset",
    "read_rows",
]
