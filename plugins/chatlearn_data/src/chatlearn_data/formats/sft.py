"""Formats for demonstrations to imitate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chatlearn_core.data.format import Message, RawExample, Row
from chatlearn_core.exceptions import DataError
from chatlearn_data.formats import columns
from chatlearn_data.options import MessagesOptions, NoOptions

_ANSWERS = ("reward_model.ground_truth", "ground_truth", "answer", "label")


class SftFormat:
    """``prompt`` (text or chat) with the text to imitate in ``completion`` or ``response``.

    A completion may also be a list of messages, of which the assistant's are imitated. An optional answer lets the same
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
            tools=columns.tools(row),
            columns=columns.rest(row, ("prompt", "id", "data_source", column)),
        )


class MessagesFormat:
    """``messages``, a whole chat, whose last turn is the assistant's.

    All of the assistant's turns are imitated, or only the last one with ``turns: last``. For a run that samples,
    everything before the last turn is the prompt.
    """

    answer_columns = _ANSWERS
    completion_columns = ("messages (the last turn, by the assistant)",)
    answer_required = False

    def __init__(self, options: MessagesOptions) -> None:
        self._all_turns = options.turns == "all"

    def parse(self, row: Row) -> RawExample:
        messages = columns.prompt(row, "messages")
        if isinstance(messages, str) or len(messages) < 2 or messages[-1].get("role") != "assistant":
            raise DataError(
                "column 'messages' must be a list of at least two messages, the last one the assistant's, "
                f"not {messages!r:.60}"
            )
        return RawExample(
            prompt=messages[:-1],
            completion=messages[-1:],
            imitates_prompt=self._all_turns,
            tools=columns.tools(row),
            ground_truth=columns.first_answer(row, _ANSWERS),
            data_source=columns.optional_text(row, "data_source"),
            id=columns.identifier(row, "id"),
            columns=columns.rest(row, ("messages", "id", "data_source")),
        )


def _completion(row: Row, column: str) -> str | Sequence[Message] | None:
    value = columns.optional(row, column)
    if value is None or isinstance(value, str):
        return value
    messages = columns.prompt(row, column)
    if not any(message.get("role") == "assistant" for message in messages if isinstance(message, Mapping)):
        raise DataError(
            f"column '{column}' must be text, or messages with at least one of the assistant, not {value!r:.60}"
        )
    return messages
