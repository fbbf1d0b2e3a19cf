from __future__ import annotations

import numpy as np

from chatlearn_core.types import Prompt, RewardResult, Sample, scored_batch


def sample(name: str, reward: RewardResult | None) -> Sample:
    return Sample(
        name,
        "p@0",
        Prompt("p", np.array([7]), "text"),
        np.array([7, 8, 9]),
        np.array([False, True, True]),
        reward=reward,
    )


def test_rewards_components_and_token_rewards() -> None:
    batch = scored_batch(
        [
            sample("a", RewardResult(1.0, {"correct": 1.0, "rare": 5.0}, np.array([0.25, 0.5], dtype=np.float32))),
            sample("b", RewardResult(0.5, {"format": 1.0, "correct": 0.0})),
        ]
    )
    assert {name: values.tolist() for name, values in batch.sequence_data.items()} == {
        "reward": [1.0, 0.5],
        "reward/correct": [1.0, 0.0],
    }, "a component that not all have is none of the batch's"
    assert batch.token_data["token_rewards"].tolist() == [0, 0.25, 0.5, 0, 0, 0]


def test_steps_are_marked_where_they_end_whatever_their_reward() -> None:
    steps = RewardResult(0.0, token_values=np.array([0.0, 0.5], np.float32), step_ends=np.array([0, 1]))
    batch = scored_batch([sample("a", steps), sample("b", RewardResult(0.5))])
    assert batch.token_data["token_rewards"].tolist() == [0, 0, 0.5, 0, 0, 0]
    assert batch.token_data["step_ends"].tolist() == [False, True, True, False, False, False]


def test_without_a_reward_of_each_there_is_none() -> None:
    assert scored_batch([sample("a", RewardResult(1.0, {"correct": 1.0})), sample("b", None)]).sequence_data == {}
    assert scored_batch([]).sequence_data == {}
