"""From data files to batches of examples: reading, formats, chat templates, filtering, mixing, a resumable sampler."""

from chatlearn_core.data.control_tokens import ControlTokens
from chatlearn_core.data.format import DatasetFormat, Message, RawExample, Row
from chatlearn_core.data.pipeline import Dataset, ExampleSet, build_dataset
from chatlearn_core.data.reader import LocatedRow, RowReader, read_rows
from chatlearn_core.data.render import PromptRenderer, RenderedPrompt
from chatlearn_core.data.report import DatasetReport
from chatlearn_core.data.sampler import Sampler
from chatlearn_core.data.settings import DatasetSettings, DataSettings, OnBadRow, Split
from chatlearn_core.data.tokenizer import Tokenizer

__all__ = [
    "ControlTokens",
    "DataSettings",
    "Dataset",
    "DatasetFormat",
    "DatasetReport",
    "DatasetSettings",
    "ExampleSet",
    "LocatedRow",
    "Message",
    "OnBadRow",
    "PromptRenderer",
    "RawExample",
    "RenderedPrompt",
    "Row",
    "RowReader",
    "Sampler",
    "Split",
    "Tokenizer",
    "build_dataset",
    "read_rows",
]
