"""The dataset format ``acme``."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any, TypeGuard

from chatlearn_core.data import RawExample, Row
from chatlearn_core.exceptions import DataError

from acme_plugin.options import AcmeOptions


class AcmeFormat:
    """``{question, choices, answer}``: the prompt lists the choices by letter; the ground truth is the right letter.

    Implements ``chatlearn_core.data.DatasetFormat``.
    """

    answer_columns = ("answer",)
    completion_columns = ()
    answer_required = True

    def __init__(self, options: AcmeOptions) -> None:
        self.options = options

    def parse(self, row: Row) -> RawExample:
        """Convert a row to an example. Raises: DataError: names the bad column; the caller adds file and line."""
        question, choices = row.get("question"), row.get("choices")
        if not isinstance(question, str) or not question.strip():
            raise DataError(f"column 'question' is {question!r}; it must be a text")
        if not is_texts(choices) or not 2 <= len(choices) <= len(ascii_uppercase):
            raise DataError(f"column 'choices' is {choices!r:.80}; it must be a list of 2 to 26 texts")
        lettered = [f"{ascii_uppercase[i]}. {choice}" for i, choice in enumerate(choices)]
        lines = [question.strip(), *lettered]
        if self.options.instruction:
            lines.append(self.options.instruction)
        return RawExample(
            prompt=[{"role": "user", "content": "\n".join(lines)}],
            ground_truth=right_letter(row.get("answer"), choices),
            id=str(row["id"]) if row.get("id") is not None else None,
            columns={name: value for name, value in row.items() if name not in ("question", "id")},
        )


def right_letter(answer: Any, choices: Sequence[str]) -> str | None:
    """Return the letter of the right choice; None if the row has no answer.

    Raises:
        DataError: the answer is none of the choices.
    """
    letters = ascii_uppercase[: len(choices)]
    if answer is None:
        return None
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return letters[answer]
    if isinstance(answer, str):
        if answer in choices:
            return letters[choices.index(answer)]
        if answer.strip().upper() in tuple(letters):
            return answer.strip().upper()
    raise DataError(
        f"column 'answer' is {answer!r}; it must be a number from 0 to {len(choices) - 1}, a letter of "
        f"{', '.join(letters)}, or the text of a choice"
    )


def is_texts(value: Any) -> TypeGuard[Sequence[str]]:
    """Whether this is a list of texts; a file reader may give a list, a tuple or an array."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, str) for item in value)
