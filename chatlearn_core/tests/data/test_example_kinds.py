"""What rows become as preferences and as a kind that a plugin adds, and the samples that they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from chatlearn_algorithms.example_kinds import Demonstrations, Preferences
from chatlearn_chat import ChatTemplateRenderer
from chatlearn_core.data import ExampleSet, Prompts, RawExample, RowRenderer, build_dataset
from chatlearn_core.exceptions import DataError
from chatlearn_core.types import (
    Answer,
    Demonstration,
    ExampleDraw,
    Preference,
    Prompt,
    Sample,
    pack_samples,
    sample_from_tokens,
)

PAIR = {"prompt": "2+2", "completions": ["4", "22"], "ranks": [1.0, 0.0]}
EOS = 1

Build = Callable[..., ExampleSet]


@pytest.fixture
def build(tokenizer: Any, plugins: Any, data_config: Any, write_rows: Any) -> Build:
    """``build(row, ..., kind=...)``: the training examples."""

    def run(*rows: Any, kind: Any = Preferences, length: int = 200, **fields: Any) -> ExampleSet:
        config = data_config(write_rows(rows), **fields)
        renderer = ChatTemplateRenderer(tokenizer, max_tokens=length)
        return build_dataset(config, renderer, plugins, kind=kind(), max_prompt_tokens=100, max_length=length)

    return run


def test_a_row_becomes_a_preference(build: Build) -> None:
    (example,) = build(PAIR | {"source": "people"})
    assert isinstance(example, Preference)
    assert (example.id, example.prompt.text, example.prompt.data_source) == (
        "train/0",
        "[user]2+2[assistant]",
        "people",
    )
    assert [answer.token_ids.tolist() for answer in example.completions] == [[ord("4"), EOS], [ord("2"), ord("2"), EOS]]
    assert (example.ranks, example.labels) == ((1.0, 0.0), ())
    assert example.num_tokens == len("[user]2+2[assistant]") + 3


def test_a_preference_gives_a_sample_for_each_completion_all_of_one_unit(build: Build) -> None:
    (example,) = build(PAIR)
    samples = Preferences().samples(ExampleDraw(example, 3, "key"))
    assert [sample.id for sample in samples] == ["train/0@3#0", "train/0@3#1"]
    assert {(sample.group_id, sample.unit_id, sample.example_id) for sample in samples} == {
        ("train/0@3", "train/0@3", "train/0")
    }
    assert [sample.sequence_data for sample in samples] == [{"rank": 1.0}, {"rank": 0.0}]
    assert [int(sample.loss_mask.sum()) for sample in samples] == [2, 3]
    batch = pack_samples(samples)
    assert batch.unit_index.tolist() == [0, 0]
    assert batch.sequence_data["rank"].tolist() == [1.0, 0.0]


def test_a_single_completion_has_a_label(build: Build) -> None:
    (example,) = build({"prompt": "2+2", "completions": ["4"], "labels": [True]})
    [sample] = Preferences().samples(ExampleDraw(example, 0, "key"))
    assert (sample.sequence_data, sample.unit_id) == ({"label": 1.0}, "train/0@0")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"completions": []}, r"no completions to compare \(looked in: completion\)"),
        ({"ranks": []}, "2 completions with 0 ranks and 0 labels; give one of the two, for every completion"),
        (
            {"labels": [True, False]},
            "2 completions with 2 ranks and 2 labels; give one of the two, for every completion",
        ),
        ({"ranks": [1.0]}, "2 completions with 1 ranks; each needs one"),
        ({"ranks": [1.0, "high"]}, "ranks must be finite numbers"),
        ({"ranks": [1.0, float("nan")]}, "ranks must be finite numbers"),
        ({"ranks": [], "labels": [1, 0]}, "labels must be true or false"),
        ({"ranks": [1.0, 1.0]}, "no preference: all 2 completions have rank 1"),
        ({"completions": ["4"], "ranks": [1.0]}, "no preference: a single completion needs a label"),
        ({"completions": ["4", "4"]}, "completions 0 and 1 are equal, but their ranks differ"),
        ({"completions": ["4", ""]}, "the completion is empty"),
    ],
)
def test_a_row_that_says_nothing_is_a_bad_row(build: Build, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=f"line 2: {reason}"):
        build(PAIR, PAIR | changes)
    kept = build(PAIR, PAIR | changes, on_bad_row="skip")
    assert (len(kept), kept.reports[0].num_bad) == (1, 1)


def test_equal_completions_of_equal_rank_are_fine(build: Build) -> None:
    (example,) = build({"prompt": "2+2", "completions": ["4", "4", "5"], "ranks": [1, 1, 0]})
    assert len(example.completions) == 3


def test_the_longest_side_decides_whether_a_preference_fits(build: Build) -> None:
    prompt = len("[user]2+2[assistant]")
    examples = build(PAIR, PAIR | {"completions": ["4", "2" * 10]}, length=prompt + 10)
    assert [example.id for example in examples] == ["train/0"]
    assert examples.reports[0].num_filtered == 1


def test_verdicts_are_part_of_the_fingerprint(build: Build) -> None:
    rows = (
        PAIR,
        PAIR | {"ranks": [2.0, 0.0]},
        PAIR | {"ranks": [], "labels": [True, False]},
        PAIR | {"completions": ["4", "23"]},
    )
    assert len({build(row).datasets[0].fingerprint for row in rows}) == 4


def test_the_same_rows_serve_other_kinds(build: Build) -> None:
    row = PAIR | {"answer": "4", "completion": "4"}
    assert isinstance(next(iter(build(row, kind=Prompts))), Prompt)
    assert isinstance(next(iter(build(row, kind=Demonstrations))), Demonstration)
    assert Prompts().samples(ExampleDraw(next(iter(build(row, kind=Prompts))), 0, "key")) == []


def test_a_demonstration_gives_one_sample() -> None:
    shown = Demonstration(Prompt("a", np.array([1, 2, 3]), "?"), np.array([8, 9, 10]), np.array([True, False, True]))
    [sample] = Demonstrations().samples(ExampleDraw(shown, 4, "key"))
    assert (sample.id, sample.token_ids.tolist()) == ("a@4#0", [1, 2, 3, 8, 9, 10])
    assert sample.loss_mask.tolist() == [False, False, False, True, False, True]
    assert (sample.turns, sample.text, sample.last_turn) == ((), "", None)


@dataclass(frozen=True)
class Rewrite:
    """A text and a better one: an example of a plugin's own."""

    prompt: Prompt
    better: Answer

    @property
    def id(self) -> str:
        return self.prompt.id

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.better.token_ids)

    def content(self) -> list[bytes]:
        return [self.better.token_ids.tobytes()]


class Rewrites:
    def build(self, raw: RawExample, row: RowRenderer) -> Rewrite:
        shown = row.rendered(raw, raw.columns["better"])
        return Rewrite(row.prompt(raw, shown.prompt), Answer(shown.completion_ids))

    def samples(self, draw: ExampleDraw) -> list[Sample]:
        example: Any = draw.example
        return [sample_from_tokens(draw, 0, example.better.token_ids)]


def test_a_plugin_adds_a_kind(build: Build) -> None:
    examples = build({"prompt": "helo", "better": "hello"}, kind=Rewrites)
    (example,) = examples
    [sample] = Rewrites().samples(ExampleDraw(example, 0, "key"))
    assert bytes(sample.completion_ids[:-1].tolist()).decode() == "hello"
    assert (
        examples.datasets[0].fingerprint
        != build({"prompt": "helo", "better": "hi"}, kind=Rewrites).datasets[0].fingerprint
    )
