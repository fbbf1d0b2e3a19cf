"""One PPO step with a critic through the whole framework against a plain loop over torch and transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.engine

LEARNING_RATE, GRAD_CLIP, TEMPERATURE, CLIP, VALUE_CLIP, GAMMA, LAMBDA, EPOCHS = (
    0.003,
    0.05,
    0.8,
    0.2,
    0.05,
    0.9,
    0.8,
    2,
)


def completion_logprobs(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """[C] logprobs of a completion at the sampling temperature, one sequence at a time, nothing packed."""
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


def completion_values(critic: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """[C] values of the states in which the tokens were chosen."""
    ids = torch.tensor([prompt + completion])
    return critic(input_ids=ids).logits[0, len(prompt) - 1 : -1, 0].double()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE)


def updated(model: Any, loss_of_all: Any) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the updates of one model."""
    optimizer, losses, norms = optimizer_of(model), [], []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        total = loss_of_all()
        total.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)))
        losses.append(float(total.detach()))
        optimizer.step()
    return losses, norms


def test_losses_and_gradient_norms_are_those_of_a_plain_loop(recipe: Any, chatlearn: Any, tiny_model: Any) -> None:
    from chatlearn_hf.heads import load_model

    options = {
        "learning_rate": LEARNING_RATE,
        "grad_clip": GRAD_CLIP,
        "weight_decay": 0.1,
        "max_tokens_per_micro_batch": 64,  # several micro-batches
    }
    roles = recipe.content["roles"]
    del roles["reference"]
    roles["trainer"]["options"] = options
    roles["critic"] = {"kind": "trainer", "backend": "fsdp", "head": "value", "options": options}
    recipe.content["algorithm"] = {
        "name": "ppo",
        "options": {"group_size": 2, "gamma": GAMMA, "gae_lambda": LAMBDA, "value_clip": VALUE_CLIP},
    }
    recipe.content["sampling"]["temperature"] = TEMPERATURE
    recipe.content["train"] = {"steps": 1, "prompts_per_step": 4, "epochs": EPOCHS}
    recipe.write()
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    [line] = [json.loads(text) for text in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]
    records = [
        json.loads(text) for text in (recipe.run_dir / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert len(records) == 8

    torch.set_num_threads(1)
    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    critic = load_model(str(tiny_model), "value", attention="eager", seed=recipe.content.get("seed", 0))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    sequences = [
        (tokenizer(record["prompt"], add_special_tokens=False)["input_ids"], record["token_ids"]) for record in records
    ]
    with torch.no_grad():
        old = [completion_logprobs(policy, *sequence) for sequence in sequences]
        old_values = [completion_values(critic, *sequence) for sequence in sequences]
    advantages, returns = [], []
    for record, values in zip(records, old_values, strict=True):
        of_sequence, following, following_value = torch.zeros(len(values)).double(), 0.0, 0.0
        for t in reversed(range(len(values))):
            reward = record["reward"] if t == len(values) - 1 else 0.0
            delta = reward + GAMMA * following_value - values[t]
            following = delta + GAMMA * LAMBDA * following
            following_value = values[t]
            of_sequence[t] = following
        advantages.append(of_sequence)
        returns.append(of_sequence + values)
    every = torch.cat(advantages)
    mean, spread, num_tokens = every.mean(), (every.var() + 1e-8).sqrt(), len(every)
    for record, of_sequence in zip(records, advantages, strict=True):
        assert record["advantages"] == pytest.approx(((of_sequence - mean) / spread).tolist(), abs=1e-3)

    def policy_loss() -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for sequence, before, of_sequence in zip(sequences, old, advantages, strict=True):
            ratio = (completion_logprobs(policy, *sequence) - before).exp()
            advantage = (of_sequence - mean) / spread
            total = total - torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum()
        return total / num_tokens

    def value_loss() -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for sequence, before, target in zip(sequences, old_values, returns, strict=True):
            values = completion_values(critic, *sequence)
            near = before + (values - before).clamp(-VALUE_CLIP, VALUE_CLIP)
            total = total + 0.5 * torch.maximum((values - target) ** 2, (near - target) ** 2).sum()
        return total / num_tokens

    for name, (losses, norms) in {
        "critic": updated(critic, value_loss),
        "policy": updated(policy, policy_loss),
    }.items():
        assert norms[0] > 0
        assert line[f"{name}/loss"] == pytest.approx(sum(losses) / EPOCHS, rel=1e-4, abs=1e-6), name
        assert line[f"{name}/grad_norm"] == pytest.approx(sum(norms) / EPOCHS, rel=1e-3), name
    assert line["training/updates"] == 2 * EPOCHS
