"""One GRPO step through the whole framework against a plain loop over torch and transformers, from the same samples."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.engine

LEARNING_RATE, KL_COEF, EPSILON, CLIP, GRAD_CLIP, TEMPERATURE = 0.003, 0.1, 1e-5, 0.2, 0.05, 0.8


def completion_logprobs(
    model: Any, prompt: list[int], completion: list[int], support: torch.Tensor | None = None
) -> torch.Tensor:
    """[C] logprobs of a completion at the sampling temperature, one sequence at a time, nothing packed.

    Args:
        support: [C, V] True for the ids that each token was sampled from; None: all.
    """
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / TEMPERATURE
    if support is not None:
        logits = logits.masked_fill(~support, -torch.inf)
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


def sampled_from(model: Any, prompt: list[int], completion: list[int], top_p: float) -> torch.Tensor:
    """[C, V] True for the ids that top-p keeps."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].double()
    ranked = (logits / TEMPERATURE).sort(dim=-1, descending=True)
    probabilities = ranked.values.softmax(-1)
    inside = probabilities.cumsum(-1) - probabilities < top_p
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ranked.indices, inside)


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}], ids=["whole", "truncated"])
def test_loss_gradient_norm_and_weights_are_those_of_a_plain_loop(
    recipe: Any, chatlearn: Any, tiny_model: Any, truncation: dict[str, Any]
) -> None:
    recipe.content["roles"]["trainer"]["options"] = {
        "learning_rate": LEARNING_RATE,
        "grad_clip": GRAD_CLIP,
        "weight_decay": 0.1,
        "max_tokens_per_micro_batch": 64,  # several micro-batches
    }
    recipe.content["algorithm"]["options"]["kl_coef"] = KL_COEF
    recipe.content["sampling"] |= {"temperature": TEMPERATURE} | truncation
    if truncation:
        recipe.content["sampling"]["max_kept_ids"] = 600  # more than the vocabulary
        # with weights of old to the generator's logprobs, which are 1 if both are of one distribution
        recipe.content["algorithm"]["options"] |= {"truncated_logprobs": True, "importance_correction": "truncate"}
    recipe.content["train"] = {"steps": 1, "prompts_per_step": 4, "epochs": 2}  # the second update has ratios and KL
    recipe.write()
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    [line] = [json.loads(text) for text in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]
    records = [
        json.loads(text) for text in (recipe.run_dir / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert len(records) == 12

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokenizer_ids = prompt_ids(recipe, records)
    groups: dict[str, list[float]] = {}
    for record in records:
        text = record["completion"]
        reward = sum(letter in "aeiou" for letter in text) / max(1, len(text))
        assert record["reward"] == pytest.approx(reward)
        groups.setdefault(record["group"], []).append(reward)

    def advantage(record: dict[str, Any]) -> float:
        rewards = groups[record["group"]]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        return (record["reward"] - mean) / (std + EPSILON)

    with torch.no_grad():
        pairs = [(prompt, record["token_ids"]) for prompt, record in zip(tokenizer_ids, records, strict=True)]
        support = [sampled_from(model, *pair, **truncation) if truncation else None for pair in pairs]
        old = [completion_logprobs(model, *pair, kept) for pair, kept in zip(pairs, support, strict=True)]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=LEARNING_RATE
    )
    losses, norms = [], []
    for _ in range(2):
        total = torch.zeros((), dtype=torch.float64)
        for pair, record, before, kept in zip(pairs, records, old, support, strict=True):
            logprobs = completion_logprobs(model, *pair, kept)
            ratio = (logprobs - before).exp()
            surrogate = torch.minimum(ratio * advantage(record), ratio.clamp(1 - CLIP, 1 + CLIP) * advantage(record))
            kl = (before - logprobs).exp() - (before - logprobs) - 1  # the reference is the policy before its updates
            total = total + (-surrogate + KL_COEF * kl).mean() / len(records)
        optimizer.zero_grad()
        total.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)))
        losses.append(float(total.detach()))
        optimizer.step()

    assert norms[0] > GRAD_CLIP, "clipping takes part"
    assert line["mismatch/logprob_diff_max"] < 1e-4
    if truncation:
        assert line["policy/importance_weight"] == pytest.approx(1.0, abs=1e-5)
    assert line["policy/loss"] == pytest.approx(sum(losses) / 2, rel=1e-4, abs=1e-6)
    assert line["policy/grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4)
    trained = load_file(recipe.run_dir / "model" / "model.safetensors")
    start = load_file(tiny_model / "model.safetensors")
    expected = model.state_dict()
    assert trained.keys() <= expected.keys()
    for name, tensor in trained.items():
        step = (expected[name] - start[name]).norm()
        assert step > 0, name
        assert (tensor - expected[name]).norm() / expected[name].norm() < 1e-4, name
        assert (tensor - expected[name]).norm() / step < 1e-2, f"{name}: of the way it went"


def prompt_ids(recipe: Any, records: list[dict[str, Any]]) -> list[list[int]]:
    """Token ids of the rendered prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(recipe.content["model"]["path"])
    return [tokenizer(record["prompt"], add_special_tokens=False)["input_ids"] for record in records]
