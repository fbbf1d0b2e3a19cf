import pytest
import torch

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.heads import load_model


@pytest.mark.parametrize("head", ["value", "reward"])
def test_a_new_head_is_keyed_by_the_seed_alone(tiny, head) -> None:
    first = load_model(str(tiny()), head, seed=1).score.weight
    torch.manual_seed(123)
    assert torch.equal(load_model(str(tiny()), head, seed=1).score.weight, first)
    assert not torch.equal(load_model(str(tiny()), head, seed=2).score.weight, first)
    assert first.std().item() == pytest.approx(65**-0.5, rel=0.3)


def test_a_critic_starts_from_a_reward_model(tiny, tmp_path) -> None:
    reward = load_model(str(tiny()), "reward", seed=5)
    reward.save_pretrained(tmp_path / "reward")
    critic = load_model(str(tmp_path / "reward"), "value", seed=6)
    assert torch.equal(critic.score.weight, reward.score.weight)
    assert not critic.score.bias.any()


def test_a_language_model_cannot_be_read_from_a_reward_model(tiny, tmp_path) -> None:
    load_model(str(tiny("qwen3", False)), "reward").save_pretrained(tmp_path / "reward")
    with pytest.raises(ModelError, match=r"missing lm_head\.weight"):
        load_model(str(tmp_path / "reward"), "lm")
