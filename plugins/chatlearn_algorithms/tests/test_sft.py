from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from chatlearn_algorithms.sft import SFT, SFTLoss
from chatlearn_algorithms.sft_options import SFTOptions
from chatlearn_core.flow import trace
from chatlearn_core.types import Prompt, Sample, pack_samples

VOCABULARY = 9


def demonstration(name: str, num_prompt: int, num_completion: int) -> Sample:
    generator = np.random.default_rng(num_prompt * 10 + num_completion)
    prompt = Prompt(name, generator.integers(0, VOCABULARY, num_prompt), "text")
    tokens = generator.integers(0, VOCABULARY, num_prompt + num_completion)
    mask = np.arange(num_prompt + num_completion) >= num_prompt
    return Sample(f"{name}@0#0", f"{name}@0", prompt, tokens, mask)


SAMPLES = [demonstration("a", 2, 3), demonstration("b", 1, 5), demonstration("c", 4, 1)]


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_equals_torch_cross_entropy(aggregation):
    loss = SFTLoss(aggregation)
    batch = loss.prepare(pack_samples(SAMPLES))
    logits = torch.randn(batch.num_tokens, VOCABULARY, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logprobs = logits.log_softmax(-1).gather(-1, batch.token_ids[:, None]).squeeze(-1)
    result = loss({"logprobs": logprobs}, batch)

    mask, tokens = batch.loss_mask, batch.token_ids
    over_tokens = cross_entropy(logits[mask], tokens[mask])
    expected = over_tokens
    if aggregation == "seq_mean_token_mean":
        index = batch.sequence_index
        expected = sum(
            cross_entropy(logits[mask & (index == s)], tokens[mask & (index == s)]) for s in range(3)
        ) / torch.tensor(3.0)
    torch.testing.assert_close(result.total, expected)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (result.total, expected)]
    torch.testing.assert_close(*gradients)
    assert result.metrics["nll"].value == pytest.approx(over_tokens.item(), rel=1e-6)
    assert result.metrics["nll"].count == 9


def test_parts_add_up():
    loss = SFTLoss()
    batch = loss.prepare(pack_samples(SAMPLES))
    logprobs = -torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    batch.token_data["logprobs"] = logprobs
    parts = [batch.select(indices) for indices in ([2], [], [1, 0])]
    total = sum(loss({"logprobs": part.token_data["logprobs"]}, part).total.item() for part in parts)
    assert total == pytest.approx(loss({"logprobs": logprobs}, batch).total.item())


def test_algorithm(make_context):
    algorithm = SFT(SFTOptions(roles={"policy": "student"}), make_context())
    assert (algorithm.input, algorithm.group_size, algorithm.policy) == ("demonstrations", 1, "student")
    assert algorithm.flow("demonstrations", None) == "demonstrations"
    [update] = algorithm.updates(1)
    assert (update.role, update.loss.needs.names, update.loss.needs.temperature) == ("student", {"logprobs"}, 1.0)
    assert algorithm.advantages(pack_samples(SAMPLES), 1).metrics["sft/tokens"].value == 9


def test_held_out_demonstrations_are_measured_where_nothing_samples(make_context):
    context = replace(make_context(), roles={"trainer": "trainer"})
    algorithm = SFT(SFTOptions(), context)
    assert algorithm.evaluation_input == "demonstrations"
    batch = pack_samples(SAMPLES)
    batch.token_data["trainer_logprobs"] = logprobs = -torch.rand(batch.num_tokens)
    metric = algorithm.evaluation_metrics(batch)["nll"]
    assert metric.value == pytest.approx(-logprobs[batch.loss_mask].double().mean().item())


def test_prompts_are_sampled_and_scored_where_the_roles_are_there(make_context):
    assert SFT(SFTOptions(), make_context()).evaluation_input is None


def test_held_out_demonstrations_are_measured_at_the_temperature_of_the_loss(make_context):
    algorithm = SFT(SFTOptions(), replace(make_context(), roles={"trainer": "trainer"}))
    graph = trace(algorithm.evaluation, {"trainer": "trainer"}, given="demonstrations")
    [update] = algorithm.updates(1)
    assert [node.arguments["temperature"] for node in graph.nodes] == [update.loss.needs.temperature] == [1.0]
