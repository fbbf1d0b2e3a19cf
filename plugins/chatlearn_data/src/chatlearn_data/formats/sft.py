"""Demonstrations to imitate."""

from __future__ import annotations

from chatlearn_core.data.format import RawExample, Row
from chatlearn_core.exceptions import DataError
from chatlearn_data.formats import columns
from chatlearn_data.options import NoOptions

_ANSWERS = ("reward_model.ground_truth", "ground_truth", "answer", "label")


class SftFormat:
    """``prompt`` (text or chat) with the text to imitate in ``completion`` or ``response``.

    A completion may also be a list that holds one assistant message. An answer, where there is one, lets the same
    file serve for evaluation.
    """

    answer_columns = _ANSWERS
    completion_columns = ("completion", "response")
    answer_required = False

    def __init__(self, options: NoOptions) -> None:
        del options

    def parse(self, row: Row) -> RawExample:
        column = next((c for c in self.completion_columns if columns.optional(row, c) is not None), "completion")
        return RawExample(
            prompt=columns.prompt(row, "prompt"),
            completion=_completion(row, column),
            ground_truth=columns.first_answer(row, _ANSWERS),
            data_source=columns.optional_text(row, "data_source"),
            id=columns.identifier(row, "id"),
            columns=columns.rest(row, ("prompt", "id", "data_source", column)),
        )


class MessagesFormat:
    """``messages``, a whole chat: the last turn is the assistant's and is imitated, the rest is the prompt."""

    answer_columns = _ANSWERS
    completion_columns = ("messages (the last turn, by the assistant)",)
    answer_required = False

    def __init__(self, options: NoOptions) -> None:
        del options

    def parse(self, row: Row) -> RawExample:
        messages = columns.prompt(row, "messages")
        if isinstance(messages, str) or len(messages) < 2 or messages[-1].get("role") != "assistant":
            raise DataError(
                "column 'messages' must be a list of at least two messages, the last one the assistant's, "
                f"not {messages!r:.60}"
            )
        return RawExample(
            prompt=messages[:-1],
            completion=columns.text(messages[-1], "content"),
            ground_truth=columns.first_answer(row, _ANSWERS),
            data_source=columns.optional_text(row, "data_source"),
            id=columns.identifier(row, "id"),
            columns=columns.rest(row, ("messages", "id", "data_source")),
        )


def _completion(row: Row, column: str) -> str | None:
    value = columns.optional(row, column)
    if value is None or isinstance(value, str):
        return value
    messages = columns.prompt(row, column)
    if len(messages) == 1 and not isinstance(messages, str) and messages[0].get("role") == "assistant":
        return columns.text(messages[0], "content")
    raise DataError(f"column '{column}' must be text or one assistant message, not {value!r:.60}")
