r"""MATH as its authors publish it (Hendrycks et al., "Measuring Mathematical Problem Solving", 2021)."""

from __future__ import annotations

from chatlearn_core.data.format import RawExample, Row
from chatlearn_data.answers import MATH_INSTRUCTION, instructed, math_answer
from chatlearn_data.formats import columns
from chatlearn_data.options import InstructionOptions


class MathFormat:
    r"""``{problem, solution, answer?}``: the ground truth is ``answer``, or the content of the solution's last
    ``\boxed``.

    The solution can be imitated.
    """

    answer_columns = ("answer", "solution")
    completion_columns = ("solution",)
    answer_required = True

    def __init__(self, options: InstructionOptions) -> None:
        self._instruction = MATH_INSTRUCTION if options.instruction is None else options.instruction

    def parse(self, row: Row) -> RawExample:
        problem = columns.text(row, "problem")
        solution = columns.text(row, "solution")
        return RawExample(
            prompt=[{"role": "user", "content": instructed(problem, self._instruction)}],
            completion=solution,
            ground_truth=math_answer(solution, columns.optional_text(row, "answer")),
            data_source="math",
            id=columns.identifier(row, "id") or columns.identifier(row, "unique_id"),
            columns=columns.rest(row, ("id",)),
        )
