"""Environments of the library verifiers, unchanged, behind the gateway."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.protocols import RoleContext, RolloutContext, RolloutOrder
from chatlearn_core.types import Prompt, Rollout, SamplingParams
from chatlearn_gateway.environment import AgentEnvironment
from chatlearn_gateway.options import AgentOptions

GUESSING = '''
import verifiers as vf
from datasets import Dataset

class Guessing(vf.MultiTurnEnv):
    """Answers "wrong" until the guess is right."""

    async def env_response(self, messages, state, **kwargs):
        if state["info"].get("breaks"):
            raise LookupError("no such level")
        return [{"role": "user", "content": "wrong"}]

    @vf.stop
    async def guessed(self, state, **kwargs):
        steps = state["trajectory"]
        return bool(steps) and state["answer"] in steps[-1]["completion"][-1]["content"]

async def turns(state, **kwargs):
    return len(state["trajectory"])

async def right(completion, answer, **kwargs):
    return float(answer in completion[-1]["content"])

def load_environment(max_turns=4):
    rows = Dataset.from_list([{"question": "what is 1 + 1?", "answer": "2"}])
    rubric = vf.Rubric(funcs=[right, turns], weights=[1.0, -0.1])
    return Guessing(max_turns=max_turns, dataset=rows, rubric=rubric)
'''


@pytest.fixture(autouse=True)
def guessing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "guessing_env.py").write_text(GUESSING)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("guessing_env", None)


async def rollout(tokenizer: Any, scripted: Any, texts: list[str], columns: Any = None, **options: Any) -> Rollout:
    environment = AgentEnvironment(AgentOptions(reward="agent", **options), RoleContext("agent"))
    environment.setup()
    messages = ({"role": "user", "content": "what is 1 + 1?"},)
    prompt = Prompt(
        "p", np.array([5], np.int64), "?", messages=messages, ground_truth="2", columns=columns or {"info": {}}
    )
    order = RolloutOrder("p@0#0", "p@0", prompt, SamplingParams(50), 7, 1000, 60.0, None)
    try:
        return await environment.rollout(prompt, RolloutContext(order, tokenizer, scripted(*texts)))
    finally:
        environment.close()


@pytest.mark.parametrize("name", ["guessing-env", "guessing_env:load_environment"])
async def test_an_environment_makes_its_rollouts_with_the_policy(name: str, tokenizer: Any, scripted: Any) -> None:
    made = await rollout(tokenizer, scripted, ["4", "3", "2"], verifiers=name)
    assert made.reward is not None
    assert made.reward.value == pytest.approx(1.0 - 0.1 * 3), "the rubric's"
    assert made.reward.components == {"right": 1.0, "turns": 3.0, "num_turns": 3.0}, "its own, and the library's"
    [sample] = made.samples
    text = tokenizer.decode(sample.token_ids, skip_special_tokens=True).replace("\n", " ")
    assert text == "user what is 1 + 1? assistant 4 user wrong assistant 3 user wrong assistant 2", (
        "one stitched sample"
    )
    assert tokenizer.decode(sample.token_ids[sample.loss_mask], skip_special_tokens=True) == "432"


async def test_arguments_and_errors(tokenizer: Any, scripted: Any) -> None:
    made = await rollout(
        tokenizer, scripted, ["4", "3"], verifiers="guessing-env", verifiers_arguments={"max_turns": 2}
    )
    assert made.reward is not None
    assert (made.reward.components["right"], made.reward.components["turns"]) == (0.0, 2.0)
    with pytest.raises(BackendError, match=r"verifiers environment 'guessing-env' .*no such level"):
        await rollout(tokenizer, scripted, ["4"], {"info": {"breaks": True}}, verifiers="guessing-env")
    with pytest.raises(ConfigError, match=r"options.verifiers 'missing-env' does not load"):
        await rollout(tokenizer, scripted, [], verifiers="missing-env")
    with pytest.raises(ConfigError, match="is a str, not an environment"):
        await rollout(tokenizer, scripted, [], verifiers="builtins:str")
