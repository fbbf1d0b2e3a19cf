from __future__ import annotations

import pytest
from chatlearn_core.data import RawExample
from chatlearn_core.exceptions import DataError
from chatlearn_testing.suites import DatasetConformance

from acme_plugin.conformance import SETTINGS
from acme_plugin.dataset import AcmeFormat
from acme_plugin.options import AcmeOptions

ROW = {"id": 3, "question": "Largest planet?", "choices": ["Mars", "Jupiter", "Venus"], "answer": 1, "level": "easy"}


class TestConformance(DatasetConformance):
    backend = "acme"
    cases = SETTINGS["dataset/acme"]["cases"]


def parse(**changes: object) -> RawExample:
    return AcmeFormat(AcmeOptions()).parse({**ROW, **changes})


def test_the_prompt_lists_the_choices_by_letter() -> None:
    options = AcmeOptions(instruction="One letter, please.")
    example = AcmeFormat(options).parse(ROW)
    (message,) = example.prompt
    assert message == {
        "role": "user",
        "content": "Largest planet?\nA. Mars\nB. Jupiter\nC. Venus\nOne letter, please.",
    }
    assert (example.ground_truth, example.id) == ("B", "3")
    assert example.columns["level"] == "easy"


@pytest.mark.parametrize("answer", [1, "B", "b", "Jupiter"])
def test_an_answer_is_a_number_a_letter_or_the_text(answer: object) -> None:
    assert parse(answer=answer).ground_truth == "B"


def test_a_row_without_answer_has_no_ground_truth() -> None:
    assert parse(answer=None).ground_truth is None


@pytest.mark.parametrize(
    ("column", "value"),
    [("question", " "), ("question", None), ("choices", ["one"]), ("choices", "AB"), ("answer", 3), ("answer", "D")],
)
def test_a_bad_row_is_an_error_that_names_the_column_and_the_value(column: str, value: object) -> None:
    with pytest.raises(DataError, match=column) as caught:
        parse(**{column: value})
    assert repr(value) in str(caught.value)
