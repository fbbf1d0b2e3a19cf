"""Every ZeRO stage on two ranks computes and learns what a loop of plain transformers forward passes does."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from chatlearn_hf.tiny import build_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EVERYTHING = [list(range(7))]
DP2 = [[0, 1, 2, 3, 4, 5], [6]]
"""Uneven: the budget cuts the first slice into more micro-batches than the second, which must keep in step."""
SGD = {
    "optimizer": "sgd",
    "learning_rate": 0.05,
    "momentum": 0.9,
    "grad_clip": 0.05,
    "weight_decay": 0.01,
    "max_tokens_per_micro_batch": 64,
}
UPDATES = 5
LAYOUTS = {
    "one": (EVERYTHING, {"zero_stage": 2}),
    "zero1": (DP2, {"zero_stage": 1}),
    "zero2": (DP2, {"zero_stage": 2}),
    "zero3": (DP2, {"zero_stage": 3}),
    # Two ranks with different numbers of chunks of logits.
    "zero3-offload-recompute": (
        DP2,
        {
            "zero_stage": 3,
            "offload_optimizer": True,
            "offload_params": True,
            "gradient_checkpointing": True,
            "logits_chunk_tokens": 16,
        },
    ),
    "zero3-ring": (EVERYTHING, {"zero_stage": 3, "ring": 2}),
    "zero3-ulysses": (EVERYTHING, {"zero_stage": 3, "ulysses": 2}),
    "zero2-offload-ulysses": (EVERYTHING, {"zero_stage": 2, "offload_optimizer": True, "ulysses": 2}),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", tie=False))


def plain_logprobs(model, batch):
    """[T] logprobs and entropies at temperature 0.7 from one forward pass of each sequence, 0 outside the loss mask."""
    logprobs, entropies = [], []
    bounds = batch.cu_seqlens.tolist()
    for start, stop in itertools.pairwise(bounds):
        ids = batch.token_ids[start:stop]
        logs = torch.log_softmax(model(ids[None]).logits[0, :-1] / 0.7, -1)
        first = logs.new_zeros(1)
        logprobs.append(torch.cat([first, logs.gather(-1, ids[1:, None])[:, 0]]))
        entropies.append(torch.cat([first, -(logs.exp() * logs).sum(-1)]))
    return torch.cat(logprobs) * batch.loss_mask, torch.cat(entropies) * batch.loss_mask


@pytest.fixture(scope="module")
def plain(model_path, seven_sequences):
    """What a loop over plain transformers forward passes computes, and what torch's SGD makes of it."""
    batch = seven_sequences
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager")
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": SGD["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=SGD["learning_rate"], momentum=SGD["momentum"])
    found = {"losses": [], "norms": []}
    for update in range(UPDATES):
        logprobs, entropies = plain_logprobs(model, batch)
        weight, advantages = batch.token_data["loss_weight"], batch.token_data["advantages"]
        loss = -(weight * (advantages * logprobs + 0.1 * entropies)).sum()
        loss.backward()
        if update == 0:
            found["logprobs"] = logprobs.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), SGD["grad_clip"])
        found["losses"].append(float(loss))
        found["norms"].append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        if update == 0:
            names = {parameter: name for name, parameter in model.named_parameters()}
            found["momentum"] = {names[p]: s["momentum_buffer"].clone() for p, s in optimizer.state.items()}
    found["weights"] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found


@pytest.fixture(scope="module")
def answers(run_jobs, seven_sequences, model_path, tmp_path_factory):
    jobs = {
        name: {"model": model_path, "slices": slices, "options": SGD | options, "updates": UPDATES}
        for name, (slices, options) in LAYOUTS.items()
    }
    return run_jobs(jobs, seven_sequences, tmp_path_factory.mktemp("parity") / "answers")


def assembled(ranks):
    """The whole first moments, from the fragments of all ranks, each element from exactly one."""
    whole, count = {}, {}
    for rank in ranks:
        for name, shape, start, values in rank["first_moments"]:
            target = whole.setdefault(name, torch.zeros(math.prod(shape)))
            seen = count.setdefault(name, torch.zeros(math.prod(shape)))
            target[start : start + len(values)] += values
            seen[start : start + len(values)] += 1
    assert all(bool((seen == 1).all()) for seen in count.values())
    return whole


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_plain_transformers(answers, plain, seven_sequences, layout) -> None:
    ranks, (slices, options) = answers[layout], LAYOUTS[layout]
    sharing = options.get("ulysses", 1) * options.get("ring", 1)
    bounds = seven_sequences.cu_seqlens.tolist()
    for index, members in enumerate(slices):
        expected = torch.cat([plain["logprobs"][bounds[s] : bounds[s + 1]] for s in members])
        for rank in ranks[index * sharing : (index + 1) * sharing]:
            torch.testing.assert_close(rank["computed"]["logprobs"], expected, atol=1e-4, rtol=0)
    for update in range(UPDATES):
        metrics = [rank["metrics"][update] for rank in ranks if rank["metrics"][update]]
        assert sum(one["loss"] for one in metrics) == pytest.approx(plain["losses"][update], rel=1e-4)
        assert metrics[0]["grad_norm"] == pytest.approx(plain["norms"][update], rel=1e-4)
        assert sum("grad_norm" in one for one in metrics) == 1
    assert plain["norms"][0] > 2 * SGD["grad_clip"], "clipping is part of the comparison"
    moments = assembled(ranks)
    assert set(moments) == plain["momentum"].keys()
    for name, expected in plain["momentum"].items():
        assert (moments[name] - expected.view(-1)).norm() <= 1e-4 * expected.norm(), name
    for rank in ranks:
        for name, expected in plain["weights"].items():
            torch.testing.assert_close(rank["weights"][name], expected, atol=2e-6, rtol=1e-4)


def test_ranks_keep_in_step(answers) -> None:
    assert [rank["metrics"][0]["perf/micro_batches"] for rank in answers["zero3"]] == [2, 1]
