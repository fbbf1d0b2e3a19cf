"""What the formats of preferences read out of a row."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from chatlearn_core.exceptions import DataError
from chatlearn_data.formats.preference import LabelledFormat, PreferenceFormat, RankedFormat
from chatlearn_data.options import NoOptions, PreferenceOptions

ASK = {"role": "user", "content": "2+2?"}
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}


def pair(row: dict[str, Any], **options: Any) -> Any:
    return PreferenceFormat(PreferenceOptions(**options)).parse(row)


def ranked(row: dict[str, Any]) -> Any:
    return RankedFormat(NoOptions()).parse({"prompt": "2+2?", "completions": ["4", "5", "6"], **row})


@pytest.mark.parametrize(
    ("row", "prompt", "sides"),
    [
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, "2+2?", ["4", "5"]),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, [ASK], [[GOOD], [BAD]]),
        ({"prompt": "2+2?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "2+2?", [[GOOD], [BAD]]),
        ({"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, [ASK], [[GOOD], [BAD]]),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, [ASK], [[GOOD], [BAD]]),
        (
            {"chosen": [ASK, BAD, ASK, GOOD], "rejected": [ASK, BAD, ASK, BAD]},
            [ASK, BAD, ASK],
            [[GOOD], [BAD]],
        ),
    ],
    ids=["texts", "messages", "text prompt repeated", "prompt repeated", "common beginning", "several turns"],
)
def test_a_pair(row: dict[str, Any], prompt: Any, sides: Any) -> None:
    raw = pair({"id": 7, "source": "people", **row})
    assert (raw.prompt, list(raw.completions), raw.ranks) == (prompt, sides, (1.0, 0.0))
    assert raw.completion == sides[0], "the chosen one is what SFT imitates"
    assert (raw.id, raw.columns) == ("7", {"source": "people"})


def test_scores_say_by_how_much() -> None:
    row = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "score_chosen": 9, "score_rejected": 1.5}
    assert pair(row).ranks == (1.0, 0.0), "only where the options name them"
    names = {"chosen_score": "score_chosen", "rejected_score": "score_rejected"}
    assert pair(row, **names).ranks == (9.0, 1.5)
    with pytest.raises(DataError, match=r"must have a higher score .*: score_chosen is 1, score_rejected is 1\.5"):
        pair(row | {"score_chosen": 1}, **names)
    with pytest.raises(DataError, match="column 'score_chosen' must contain numbers, not 'high'"):
        pair(row | {"score_chosen": "high"}, **names)
    with pytest.raises(ValidationError, match="go together"):
        PreferenceOptions(chosen_score="score_chosen")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "2+2?", "chosen": "4"}, "column 'rejected' is missing"),
        ({"prompt": "2+2?", "chosen": "4", "rejected": None}, "column 'rejected' is null"),
        ({"prompt": "2+2?", "chosen": "4", "rejected": 5}, "column 'rejected' must be text or a list of messages"),
        ({"chosen": "4", "rejected": "5"}, "column 'prompt' is missing, .* not both conversations"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "column 'prompt' is missing, .* no common beginning"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, "the same conversation"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK]}, "the beginning of the other"),
    ],
)
def test_a_pair_that_is_none(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        pair(row)


@pytest.mark.parametrize(
    ("verdicts", "ranks", "labels", "best"),
    [
        ({"scores": [0.5, 2, 1]}, [0.5, 2.0, 1.0], (), "5"),
        ({"ranks": [2, 3, 1]}, [-2.0, -3.0, -1.0], (), "6"),
        ({"labels": [False, True, True]}, [], [False, True, True], "5"),
        ({"labels": [False, False, False]}, [], [False] * 3, None),
    ],
)
def test_several_completions(verdicts: dict[str, Any], ranks: Any, labels: Any, best: Any) -> None:
    raw = ranked(verdicts)
    assert (raw.ranks, raw.labels, raw.completion) == (ranks, labels, best)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "need one of the columns 'scores' .* the row has none of them"),
        ({"scores": [1, 2, 3], "labels": [True] * 3}, "the row has 'scores' and 'labels'"),
        ({"scores": [1, "2", 3]}, "column 'scores' must contain numbers, not '2'"),
        ({"scores": 3}, "column 'scores' must be a list with an entry for each completion, not 3"),
        ({"completions": [], "scores": []}, "column 'completions' must be a list"),
        ({"completions": ["4", 5], "scores": [1, 2]}, "column 'completions' must be text or a list of messages, not 5"),
    ],
)
def test_several_completions_that_say_nothing(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        ranked(row)


@pytest.mark.parametrize(("label", "imitated"), [(True, "4"), (False, None)])
def test_a_completion_with_a_label(label: bool, imitated: Any) -> None:
    raw = LabelledFormat(NoOptions()).parse({"prompt": "2+2?", "completion": "4", "label": label, "level": 1})
    assert (raw.completions, raw.labels, raw.ranks, raw.completion) == (("4",), (label,), (), imitated)
    assert raw.columns == {"level": 1}


def test_a_label_is_true_or_false() -> None:
    with pytest.raises(DataError, match="column 'label' must be true or false, not 1"):
        LabelledFormat(NoOptions()).parse({"prompt": "2+2?", "completion": "4", "label": 1})
