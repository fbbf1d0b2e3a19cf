"""The kind of examples that a generator completes."""

from __future__ import annotations

from chatlearn_core.data.example_kind import RowRenderer
from chatlearn_core.data.format import RawExample
from chatlearn_core.types import ExampleDraw, Prompt, Sample


class Prompts:
    """Prompts that a generator completes."""

    def build(self, raw: RawExample, row: RowRenderer) -> Prompt:
        """The prompt of a row; raises if its rewards need an answer and the row has none."""
        prompt = row.prompt(raw)
        row.require_answer(raw)
        return prompt

    def samples(self, draw: ExampleDraw) -> list[Sample]:
        """Empty: a generator makes the samples."""
        return []
