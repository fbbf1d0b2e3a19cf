"""Chat prompts with a nested ground truth, as ``chatlearn data prepare`` writes them; common in published data."""

from __future__ import annotations

from collections.abc import Mapping

from chatlearn_core.data.format import RawExample, Row
from chatlearn_core.exceptions import DataError
from chatlearn_data.formats import columns
from chatlearn_data.options import AnswerOptions


class VerifiableFormat:
    """``{data_source, prompt: [{role, content}], ability, reward_model: {style, ground_truth}, extra_info}``.

    The ground truth is ``reward_model.ground_truth``. ``ability``, ``extra_info``, ``reward_model`` itself and all
    other columns are passed on. ``completion`` or ``response``, if present, can be imitated.
    """

    answer_columns = ("reward_model.ground_truth",)
    completion_columns = ("completion", "response")

    def __init__(self, options: AnswerOptions) -> None:
        self.answer_required = options.answer == "required"

    def parse(self, row: Row) -> RawExample:
        reward_model = columns.optional(row, "reward_model")
        if reward_model is not None and not isinstance(reward_model, Mapping):
            raise DataError(f"column 'reward_model' must be an object, not {reward_model!r:.60}")
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
