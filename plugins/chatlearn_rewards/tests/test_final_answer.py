from __future__ import annotations

import pytest

from chatlearn_rewards.final_answer import has_open_box, last_boxed, last_tagged


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"\boxed{\frac{1}{2}} then \boxed{a_{1}}", "a_{1}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{1} and cut short \boxed{2", "1"),
        (r"\fbox{first} \boxed {7}", "7"),
        (r"\boxed {7} \fbox{last}", "last"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed5 and so on", "5"),
        (r"\boxed{1\\{2}}", r"1\\{2}"),
        ("} \\boxed{3}", "3"),
        (r"\boxedtext{4}", None),
        ("nothing", None),
    ],
)
def test_last_boxed_matches_braces(text, held):
    found = last_boxed(text)
    assert (found.text if found else None) == held


def test_what_leads_to_an_answer_is_kept():
    assert last_boxed("it is not \\boxed{3}").before == "it is not "
    assert last_tagged("a <answer>1</answer> b <answer>2</answer>").text == "2"
    assert last_tagged("a <answer>1</answer> b <answer>2").text == "1"
    assert last_tagged("</answer> <answer>") is None


def test_a_box_that_was_cut_short():
    assert has_open_box(r"it is \boxed{\frac{1}")
    assert not has_open_box(r"it is \boxed{1} or \boxed{2")
    assert not has_open_box("{")
