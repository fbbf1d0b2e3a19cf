from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from chatlearn_rewards import rule_options as options
from chatlearn_rewards.answer_text import text_problem
from chatlearn_rewards.json_checking import schema_problem
from chatlearn_rewards.pooled_rules import FuzzyMatchReward, JsonSchemaReward, row_schema_problem
from chatlearn_rewards.rule_rewards import (
    ExactMatchReward,
    LengthReward,
    MultipleChoiceReward,
    RepetitionReward,
    choice_problem,
    chosen,
    repeated_share,
)

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.mark.parametrize(
    ("text", "strict", "letter"),
    [
        (r"So \boxed{C}.", True, "C"),
        (r"\boxed{\text{(B)}}", True, "B"),
        ("<answer> d </answer>", True, "D"),
        ("A and B are wrong, so the answer is (C).", True, "C"),
        ("**Answer:** C) Paris", True, "C"),
        ("The correct answer is option D", True, "D"),
        ("C is wrong.\nTherefore B.", False, "B"),
        ("C is wrong.\nTherefore B.", True, None),
        ("The answer is A or B.", False, None),
        (r"\boxed{A, B, C, D}", False, None),
        (r"\boxed{Apple}", False, None),
        ("The answer is a lot of work", False, None),
        ("Perhaps A, perhaps B", False, None),
        ("I choose B.", False, "B"),
        ("A or B", False, None),
        ("I think so", False, None),
        ("A good question", False, None),
        ("", False, None),
    ],
)
def test_a_choice_counts_if_it_is_the_only_one(text, strict, letter):
    assert chosen(text, options.MultipleChoiceOptions(choices="ABCD", strict=strict)) == letter


def test_multiple_choice_takes_letters_and_numbers(make_sample, context):
    reward = MultipleChoiceReward(options.MultipleChoiceOptions(choices="ABCD", incorrect=-0.5), context)
    results = [reward.judge(make_sample("Answer: B", truth)) for truth in ("B", "(b)", 1, "C", "E", 4, None)]
    assert [result.value for result in results] == [1, 1, 1, -0.5, None, None, None]
    assert results[0].components == {"accuracy": 1.0}
    assert (
        "prompt 'p0' has the ground truth 'E'; it must be a letter of ABCD, or a number from 0 to 3" in results[4].error
    )
    assert choice_problem(options.MultipleChoiceOptions(), "E") is None


@pytest.mark.parametrize(
    ("settings", "lengths", "expected"),
    [
        ({"minimum": 3, "maximum": 5}, [2, 3, 5, 6], [0, 1, 1, 0]),
        ({"maximum": 4, "band": 3, "outside": -1, "inside": 0}, [4, 5, 6, 7, 8], [0, -0.25, -0.5, -0.75, -1]),
        ({"target": 10, "band": 1}, [8, 9, 10, 11, 12], [0, 0.5, 1, 0.5, 0]),
    ],
)
def test_length_falls_evenly_over_the_band(make_sample, context, settings, lengths, expected):
    """The band's n units have the values 1 - k / (n + 1), k from 1: the first unit beyond it has none."""
    reward = LengthReward(options.LengthOptions(unit="characters", **settings), context)
    results = [reward.judge(make_sample("x" * length)) for length in lengths]
    assert [result.value for result in results] == pytest.approx(expected)
    assert [result.components for result in results] == [{"length": float(length)} for length in lengths]


def test_length_in_tokens(make_sample, context):
    """The fixture's completions have three tokens."""
    for minimum, value in ((3, 1.0), (4, 0.0)):
        assert LengthReward(options.LengthOptions(minimum=minimum), context).judge(make_sample("x" * 50)).value == value


@pytest.mark.parametrize(
    ("text", "n", "share"),
    [("a b c d", 2, 0.0), ("a b a b a b", 2, 3 / 5), ("a a a a", 1, 3 / 4), ("a b", 3, 0.0), ("", 1, 0.0)],
)
def test_the_share_of_repeated_n_grams(text, n, share):
    assert repeated_share(text.split(), n) == pytest.approx(share)


def test_repetition_is_penalised_above_what_is_tolerated(make_sample, context):
    """A A a a: three of four 1-grams are repeated; of the half above 0.5, a half."""
    reward = RepetitionReward(options.RepetitionOptions(n=1, penalty=-2, tolerated=0.5), context)
    assert reward.judge(make_sample("A A a a")).value == pytest.approx(-1.0)
    assert reward.judge(make_sample("a b a")).value == 0.0
    tokens = RepetitionReward(options.RepetitionOptions(n=1, unit="tokens"), context)
    assert tokens.judge(make_sample("a a a")).value == 0.0  # its tokens 3, 4, 5 differ


@pytest.mark.parametrize(("token_ids", "value"), [([1, 2, 1, 2, 1, 2], -0.6), ([7], 0.0)])
def test_repetition_of_tokens_has_the_values_of_trl(make_sample, context, token_ids, value):
    """Values of TRL 1.16's own function (``trl/rewards/other_rewards.py``) for 2-grams and a penalty of at most -1."""
    reward = RepetitionReward(options.RepetitionOptions(n=2, unit="tokens"), context)
    sample = make_sample("")
    ids = np.concatenate([sample.token_ids[: sample.num_prompt_tokens], token_ids])
    assert reward.judge(replace(sample, token_ids=ids)).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("settings", "text", "truth", "value"),
    [
        ({}, " Paris\n", "Paris", 1),
        ({}, "paris", "Paris", 0),
        ({"ignore_case": True}, "PARIS", ["Rome", "Paris"], 1),
        ({"ignore_case": True, "ignore_punctuation": True, "ignore_articles": True}, "The  Beatles!", "beatles", 1),
        ({"take": "answer"}, "I say <answer>Paris</answer> at last", "Paris", 1),
        ({"take": "answer"}, "Paris", "Paris", 0),
        ({"take": "last_line"}, "It is\n\nParis\n", np.array(["Paris"]), 1),
        ({}, "42", 42, 1),
        ({}, "x", [], None),
        ({}, "x", " ", None),
    ],
)
def test_exact_match(make_sample, context, settings, text, truth, value):
    chosen = options.ExactMatchOptions(**settings)
    result = ExactMatchReward(chosen, context).judge(make_sample(text, truth))
    assert result.value == value
    assert (result.error is None) is (text_problem(chosen, truth) is None)


def test_votes_are_what_was_compared(make_sample, context):
    """Right answers share a vote, however they are written; wrong ones vote for themselves, no answer for none."""
    exact = ExactMatchReward(options.ExactMatchOptions(take="answer", ignore_case=True), context)
    texts = ("<answer>Paris</answer>", "<answer>LUTETIA</answer>", "<answer> rome</answer>", "no idea")
    votes = [exact.judge(make_sample(text, ["Paris", "Lutetia"])).answer for text in texts]
    assert votes == ["paris", "paris", "rome", None]
    choice = MultipleChoiceReward(options.MultipleChoiceOptions(), context)
    votes = [choice.judge(make_sample(text, "B")).answer for text in (r"\boxed{B}", "The answer is (C).", "B or C")]
    assert votes == ["B", "C", None]


async def test_fuzzy_match_is_a_similarity(use, make_sample):
    """2 M / T by hand: "abcd" and "bcde" share bcd, 6 / 8."""
    reward = use(FuzzyMatchReward, options.FuzzyMatchOptions(num_workers=1, threshold=0.5))
    truths = ["bcde", ["x", "ABCD"], "azzz", None]
    results = await reward.score([make_sample("abcd", truth) for truth in truths])
    assert [result.value for result in results] == [pytest.approx(0.75), 1.0, 0.0, None]
    assert results[2].components == {"similarity": pytest.approx(0.25)}
    assert "prompt 'p0' has the ground truth None; it must be a text" in results[3].error


async def test_fuzzy_match_of_texts_that_take_too_long_is_wrong(use, make_sample):
    reward = use(FuzzyMatchReward, options.FuzzyMatchOptions(num_workers=1, timeout_s=0.3))
    [result] = await reward.score([make_sample("ab" * 20_000, "ba" * 20_000)])
    assert (result.value, result.components) == (0.0, {"similarity": 0.0, "ungraded": 1.0})


async def test_json_schema(use, make_sample):
    reward = use(JsonSchemaReward, options.JsonSchemaOptions(json_schema=SCHEMA, not_json=-1, num_workers=1))
    texts = [
        '{"name": "a"}',
        'So:\n```json\n{"name": "a"}\n```\n',
        '{"name": 1}',
        "{}",
        "name",
        '{"name": NaN}',
        "[" * 9999,
    ]
    results = await reward.score([make_sample(text) for text in texts])
    assert [result.value for result in results] == [1, 1, 0, 0, -1, -1, -1]
    assert [result.components["json"] for result in results] == [1, 1, 1, 1, 0, 0, 0]


async def test_json_schema_of_rows(use, make_sample):
    """A reference leads nowhere but into the schema itself; a pattern that backtracks for ever is killed."""
    reward = use(JsonSchemaReward, options.JsonSchemaOptions(num_workers=1, timeout_s=1.0))
    slow = {"type": "string", "pattern": "^(a+)+$"}
    rows = [SCHEMA, '{"type": "object"}', {"type": "tree"}, "{", {"$ref": "http://192.0.2.1/a.json"}, slow, None]
    texts = ['{"name": "a"}', "{}", "{}", "{}", "{}", '"' + "a" * 40 + 'b"', "{}"]
    results = await reward.score([make_sample(text, row) for text, row in zip(texts, rows, strict=True)])
    assert [result.value for result in results] == [1, 1, None, None, None, 0, None]
    assert "prompt 'p0' has a ground truth that is not a JSON Schema: at $.type: 'tree'" in results[2].error
    assert "is not JSON" in results[3].error
    assert "refers to 'http://192.0.2.1/a.json', which it does not define" in results[4].error
    assert results[5].components == {"json": 0.0, "accuracy": 0.0, "ungraded": 1.0}
    assert "is a NoneType; it must be an object" in results[6].error


def test_a_schema_among_the_options_makes_rows_irrelevant():
    assert row_schema_problem(options.JsonSchemaOptions(json_schema=True), None) is None
    assert schema_problem({"pattern": 3}).startswith("is not a JSON Schema: at $.pattern")


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        (options.MultipleChoiceOptions, {"choices": "AAB"}, "choices 'AAB' must be at least two different capital"),
        (options.LengthOptions, {}, "no limit is set; set minimum, maximum or target"),
        (options.LengthOptions, {"target": 3, "maximum": 5}, "set either target, or minimum and maximum"),
        (options.LengthOptions, {"minimum": 6, "maximum": 5}, "maximum is 5 and minimum is 6"),
        (options.RepetitionOptions, {"penalty": 1.0}, "less than or equal to 0"),
        (options.FuzzyMatchOptions, {"threshold": 2}, "less than or equal to 1"),
        (options.JsonSchemaOptions, {"json_schema": {"type": "tree"}}, "json_schema is not a JSON Schema: at \\$.type"),
    ],
)
def test_options_that_mean_nothing_are_refused(model, settings, said):
    with pytest.raises(ValidationError, match=said):
        model(**settings)
