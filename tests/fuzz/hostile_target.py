"""Scores completions by ``hostile_reward.py`` as a run does: what ``test_hostile_rewards.py`` starts in processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
from hostile_reward import ACTIONS, MARK

from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import RAW_BASIS, Completion, Prompt, Sample, SamplingParams, sample_from_completion
from chatlearn_rewards.function_reward import FunctionReward
from chatlearn_rewards.options import FunctionOptions
from chatlearn_runtime_kit.rewards import CombinedReward, RewardPart
from chatlearn_testing.processes import environment, processes


def sample(index: int, text: str) -> Sample:
    prompt = Prompt(f"p{index}", np.array([1, 2]), "?", "fuzz")
    completion = Completion(
        "r", np.array([3]), np.zeros(1, np.float32), RAW_BASIS, "stop", SamplingParams(1), (), text=text
    )
    return sample_from_completion(f"p{index}@1#0", f"p{index}@1", prompt, completion)


def actions(order: None) -> list[str]:
    """All that a completion can ask for."""
    return list(ACTIONS)


def judge(order: dict[str, Any]) -> dict[str, Any]:
    """The verdicts on batches of completions, and the processes that are left when the reward is closed."""
    os.environ[MARK] = order["mark"]
    path = f"{Path(__file__).with_name('hostile_reward.py')}:score"
    options = FunctionOptions(path=path, num_workers=order["num_workers"], timeout_s=order["timeout_s"])
    reward = FunctionReward(options, RoleContext(role="reward"))
    reward.setup()
    combined = CombinedReward("reward", [RewardPart("hostile", reward)], 60.0)

    async def score() -> list[list[Any]]:
        return [
            [
                [result.value, result.error]
                for result in await combined.score([sample(i, t) for i, t in enumerate(batch)])
            ]
            for batch in order["batches"]
        ]

    verdicts = asyncio.run(score())
    reward.close()
    left = [pid for pid in processes() if environment(pid).get(MARK) == order["mark"] and pid != os.getpid()]
    return {"verdicts": verdicts, "left": left}
