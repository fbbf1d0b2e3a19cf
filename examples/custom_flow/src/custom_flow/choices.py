"""A dataset format: multiple choice. And a plain function as its reward."""

from typing import Any

from chatlearn_core.data.format import RawExample, Row
from chatlearn_core.exceptions import DataError
from custom_flow.options import ChoicesOptions


class ChoicesFormat:
    """``{"question": "...", "choices": ["...", "..."], "right": 0}``; the ground truth is the right choice's letter."""

    answer_columns = ("right",)
    completion_columns = ()
    answer_required = True

    def __init__(self, options: ChoicesOptions) -> None:
        self.letters = options.letters

    def parse(self, row: Row) -> RawExample:
        """Lay the choices out below the question.

        Raises:
            DataError: the right choice does not exist, or there are more choices than letters.
        """
        choices, right = row["choices"], row["right"]
        if not isinstance(right, int) or not 0 <= right < len(choices) <= len(self.letters):
            raise DataError(
                f"right={right!r} must be the index of one of the {len(choices)} choices, of which there may be at "
                f"most {len(self.letters)}: correct the row, or set options.letters of the dataset"
            )
        lines = [f"{letter}) {choice}" for letter, choice in zip(self.letters, choices, strict=False)]
        return RawExample(
            prompt="\n".join([row["question"], *lines, "Answer with a letter."]),
            ground_truth=self.letters[right],
            id=row.get("id"),
        )


def chose(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float]:
    """1 if the first capital letter is the right choice's; otherwise up to 0.1, for letters rather than other signs."""
    first = next((letter for letter in solution_str if "A" <= letter <= "Z"), None)
    right = float(first == ground_truth)
    share = sum(map(str.isalpha, solution_str)) / max(1, len(solution_str))
    return {"score": right or 0.1 * share, "accuracy": right}
