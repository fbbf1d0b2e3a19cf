"""A format whose columns the configuration names."""

from __future__ import annotations

from chatlearn_core.data.format import RawExample, Row
from chatlearn_data.formats import columns
from chatlearn_data.options import KeysOptions


class KeysFormat:
    """Reads prompt, answer, completion, id and data source from the columns that the options name."""

    def __init__(self, options: KeysOptions) -> None:
        self._options = options
        self.answer_columns = (options.label_key,) if options.label_key else ()
        self.completion_columns = (options.completion_key,) if options.completion_key else ()
        self.answer_required = options.answer == "required" and options.label_key is not None

    def parse(self, row: Row) -> RawExample:
        keys = self._options
        return RawExample(
            prompt=columns.prompt(row, keys.input_key),
            completion=columns.optional_text(row, keys.completion_key) if keys.completion_key else None,
            ground_truth=columns.first_answer(row, self.answer_columns),
            data_source=columns.text(row, keys.data_source_key) if keys.data_source_key else None,
            id=columns.identifier(row, keys.id_key) if keys.id_key else None,
            tools=columns.tools(row, keys.tools_key) if keys.tools_key else (),
            columns=columns.rest(row, (keys.input_key, keys.completion_key or "", keys.id_key or "")),
        )
