from __future__ import annotations

import pytest
from pydantic import ValidationError

from chatlearn_rewards.format_reward import FormatReward
from chatlearn_rewards.options import FormatOptions

THINK = r"<think>.*?</think>\s*<answer>.*?</answer>"


async def test_full_match(use, make_sample):
    reward = use(FormatReward, FormatOptions(pattern=THINK, matched=0.5, unmatched=-0.5, num_workers=1))
    texts = ["<think>a\nb</think> <answer>1</answer>", "so <think>a</think><answer>1</answer>", ""]
    results = await reward.score([make_sample(text) for text in texts])
    assert [r.value for r in results] == [0.5, -0.5, -0.5]
    assert [r.components for r in results] == [{"format": 1.0}, {"format": 0.0}, {"format": 0.0}]


async def test_search_and_flags(use, make_sample):
    options = FormatOptions(pattern=r"answer: \d+$", match="search", flags=["ignorecase", "multiline"], num_workers=1)
    reward = use(FormatReward, options)
    results = await reward.score([make_sample("So\nANSWER: 5\nyes"), make_sample("answer: five")])
    assert [r.value for r in results] == [1.0, 0.0]


async def test_a_pattern_that_backtracks_for_ever_is_killed(use, make_sample):
    """(a+)+b on a run of a's takes 2^n steps inside C code that holds the interpreter lock."""
    reward = use(FormatReward, FormatOptions(pattern="(a+)+b", timeout_s=1.0, num_workers=1))
    results = await reward.score([make_sample("aab"), make_sample("a" * 60), make_sample("ab")])
    assert [r.value for r in results] == [1.0, 0.0, 1.0]
    assert results[1].components == {"format": 0.0, "ungraded": 1.0}


async def test_one_that_cannot_be_judged_is_excluded_if_asked_for(use, make_sample):
    reward = use(FormatReward, FormatOptions(pattern="(a+)+b", timeout_s=0.3, num_workers=1, ungraded="exclude"))
    (result,) = await reward.score([make_sample("a" * 60)])
    assert result.value is None
    assert "timed out after 0.3 s" in result.error


def test_a_broken_pattern_is_refused_with_its_text():
    with pytest.raises(ValidationError, match=r"pattern '\(a' is not a regular expression: missing \)"):
        FormatOptions(pattern="(a")
