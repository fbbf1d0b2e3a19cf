"""GSM8K as its authors publish it (Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021)."""

from __future__ import annotations

from chatlearn_core.data.format import RawExample, Row
from chatlearn_data.answers import GSM8K_INSTRUCTION, gsm8k_answer, gsm8k_solution, instructed
from chatlearn_data.formats import columns
from chatlearn_data.options import InstructionOptions


class Gsm8kFormat:
    """``{question, answer}``: the ground truth is the number after ``####``; the worked answer can be imitated."""

    answer_columns = ("answer",)
    completion_columns = ("answer",)
    answer_required = True

    def __init__(self, options: InstructionOptions) -> None:
        self._instruction = GSM8K_INSTRUCTION if options.instruction is None else options.instruction

    def parse(self, row: Row) -> RawExample:
        question = columns.text(row, "question")
        answer = columns.text(row, "answer")
        return RawExample(
            prompt=[{"role": "user", "content": instructed(question, self._instruction)}],
            completion=gsm8k_solution(answer),
            ground_truth=gsm8k_answer(answer),
            data_source="gsm8k",
            id=columns.identifier(row, "id"),
            columns=columns.rest(row, ("id",)),
        )
