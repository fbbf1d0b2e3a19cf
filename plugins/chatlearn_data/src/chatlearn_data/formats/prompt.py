"""A format with a prompt and any other columns."""

from __future__ import annotations

from chatlearn_core.data.format import RawExample, Row
from chatlearn_data.formats import columns
from chatlearn_data.options import AnswerOptions


class PromptFormat:
    """``prompt`` (text or chat) plus any columns.

    The ground truth is the first non-empty one of ``ground_truth``, ``answer``, ``label``, ``solution``; ``completion``
    or ``response`` can be imitated. Every column except the prompt and id is passed on, so that a reward function that
    takes ``answer`` or ``solution`` by name receives it.
    """

    answer_columns = ("ground_truth", "answer", "label", "solution")
    completion_columns = ("completion", "response")

    def __init__(self, options: AnswerOptions) -> None:
        self.answer_required = options.answer == "required"

    def parse(self, row: Row) -> RawExample:
        completion = next((c for c in self.completion_columns if columns.optional(row, c) is not None), "completion")
        return RawExample(
            prompt=columns.prompt(row, "prompt"),
            completion=columns.optional_text(row, completion),
            ground_truth=columns.first_answer(row, self.answer_columns),
            data_source=columns.optional_text(row, "data_source"),
            id=columns.identifier(row, "id"),
            tools=columns.tools(row),
            columns=columns.rest(row, ("prompt", "id", "data_source", completion)),
        )
