"""The environment ``correction``: attempts of a scripted policy, and checks that misbehave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chatlearn_agents.correction_environment import CorrectionEnvironment, last_number_equals
from chatlearn_agents.options import CorrectionOptions
from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import Prompt

CHECKS = """
def contains(text, truth):
    return truth in text

def raises(text, truth):
    raise LookupError("no key")

def talks(text, truth):
    return "perhaps"

def one(text):
    return True
"""


@pytest.fixture(autouse=True)
def some_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_checks.py").write_text(CHECKS)
    monkeypatch.syspath_prepend(str(tmp_path))


def environment_of(**options: Any) -> CorrectionEnvironment:
    environment = CorrectionEnvironment(CorrectionOptions(**options), RoleContext("correction"))
    environment.setup()
    return environment


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("1 + 1 = 2", "2", True),
        ("so 1,234.50", 1234.5, True),
        ("2 or 3", "2", False),
        ("two", 2, False),
        ("-2", 2, False),
    ],
)
def test_the_last_number_counts(text: str, truth: Any, right: bool) -> None:
    assert last_number_equals(text, truth) is right


async def test_it_ends_with_the_first_right_attempt(plays: Any, tokenizer: Any) -> None:
    played = await plays(environment_of(message="Wrong."), tokenizer, ["3", "It is 2", "never asked"])
    told = "<|im_start|>user\nWrong.<|im_end|>\n"
    assert played.text.endswith(f"<|im_start|>assistant\n3<|im_end|>\n{told}<|im_start|>assistant\nIt is 2<|im_end|>")
    assert played.sampled_text == "3<|im_end|>It is 2<|im_end|>"
    reward = played.rollout.reward
    assert reward.value == pytest.approx(0.8)
    assert reward.components == {"accuracy": 1.0, "first_attempt": 0.0}
    assert (played.rollout.status, played.count("turns")) == ("finished", 2)


async def test_attempts_turns_and_tokens_end_it(plays: Any, tokenizer: Any) -> None:
    options = {"max_attempts": 2, "incorrect": -1.0}
    played = await plays(environment_of(**options), tokenizer, ["3", "4", "2"])
    assert (played.rollout.status, played.rollout.reward.value, played.count("turns")) == ("finished", -1.0, 2)
    played = await plays(environment_of(**options), tokenizer, ["3", "2"], max_turns=1)
    assert (played.rollout.status, played.rollout.reward.value) == ("truncated", -1.0)
    played = await plays(environment_of(**options), tokenizer, ["3", "2"], max_tokens=40)
    assert (played.rollout.status, played.count("turns")) == ("truncated", 1)
    played = await plays(environment_of(), tokenizer, ["2"])
    assert (played.rollout.reward.value, played.rollout.reward.components["first_attempt"]) == (1.0, 1.0)


async def test_checks_of_users(plays: Any, tokenizer: Any, plain_prompt: Prompt) -> None:
    played = await plays(environment_of(check="some_checks:contains"), tokenizer, ["2, not 3"])
    assert played.rollout.reward.value == 1.0
    with pytest.raises(BackendError, match=r"options.check raised LookupError: no key"):
        await plays(environment_of(check="some_checks:raises"), tokenizer, ["2"])
    with pytest.raises(BackendError, match="returned 'perhaps'; it returns whether the turn is right"):
        await plays(environment_of(check="some_checks:talks"), tokenizer, ["2"])
    prompt = replace(plain_prompt, ground_truth="two")
    with pytest.raises(BackendError, match=r"the ground truth 'two' is no number; set options.check"):
        await plays(environment_of(), tokenizer, ["2"], prompt=prompt)
    for check, words in (("some_checks:none", "cannot be imported"), ("some_checks:one", "cannot be called with")):
        with pytest.raises(ConfigError, match=words):
            environment_of(check=check)
