from __future__ import annotations

import math
import pickle

import pytest
import torch
from pydantic import ValidationError

from chatlearn_algorithms.distillation import Distillation, DistillationLoss, taught
from chatlearn_algorithms.distillation_options import DistillationOptions
from chatlearn_core.flow import trace
from chatlearn_core.types import LogprobBasis, pack_samples

ROLES = {"generator": "generator", "trainer": "trainer", "maths": "trainer", "code": "trainer", "teacher": "trainer"}


@pytest.fixture
def make(make_context):
    def build(**options):
        context = make_context(LogprobBasis(temperature=0.7), maths="trainer", code="trainer", teacher="trainer")
        return Distillation(DistillationOptions(**options), context)

    return build


def drawn(batch, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch.num_tokens, *shape, dtype=torch.float64, generator=generator)
    logprobs = logits.log_softmax(-1)[:, :-2] if shape else -logits.abs()
    mask = batch.loss_mask if not shape else batch.loss_mask[:, None]
    return torch.where(mask, logprobs, 0.0)


@pytest.fixture
def batch(make_group):
    made = pack_samples([*make_group("a", [0.0, 0.0]), *make_group("b", [0.0])])
    made.token_data["teacher_topk_logprobs"] = drawn(made, 5, seed=1)
    return made


def kl(p: list[float], q: list[float]) -> float:
    """Of distributions over three tokens and the rest."""
    p, q = ([*one, 1 - sum(one)] for one in (p, q))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_value_by_a_loop(make, batch, divergence, aggregation):
    loss = make(divergence=divergence, jsd_beta=0.3, aggregation=aggregation, top_k=3).loss()
    student = drawn(batch, 5, seed=2)
    prepared = loss.prepare(batch)
    found = loss({"logprobs_at": student}, prepared)
    of_sequence: dict[int, list[float]] = {}
    for t in batch.loss_mask.nonzero().flatten().tolist():
        s = student[t].exp().tolist()
        teacher = batch.token_data["teacher_topk_logprobs"][t].exp().tolist()
        mixture = [0.7 * a + 0.3 * b for a, b in zip(s, teacher, strict=True)]
        value = {
            "forward_kl": kl(teacher, s),
            "reverse_kl": kl(s, teacher),
            "jsd": 0.3 * kl(teacher, mixture) + 0.7 * kl(s, mixture),
        }[divergence]
        of_sequence.setdefault(int(batch.sequence_index[t]), []).append(value)
    tokens = [value for values in of_sequence.values() for value in values]
    means = [sum(values) / len(values) for values in of_sequence.values()]
    expected = sum(tokens) / len(tokens) if aggregation == "token_mean" else sum(means) / len(means)
    assert found.total.item() == pytest.approx(expected, rel=1e-5)
    assert found.metrics["divergence"].value == pytest.approx(sum(tokens) / len(tokens), rel=1e-5)


def test_gradient_micro_batches_and_travel(make, batch):
    loss = make(divergence="jsd").loss()
    assert isinstance(loss, DistillationLoss)
    prepared, student = loss.prepare(batch), drawn(batch, 5, seed=2)
    assert torch.autograd.gradcheck(
        lambda x: loss({"logprobs_at": x}, prepared).total, (student.clone().requires_grad_(),), atol=1e-6
    )
    prepared.token_data["student"] = student
    parts = [prepared.select(indices) for indices in ([2], [], [1, 0])]
    totals = [loss({"logprobs_at": part.token_data["student"]}, part).total.item() for part in parts]
    assert sum(totals) == pytest.approx(loss({"logprobs_at": student}, prepared).total.item())
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_the_loss_asks_for_what_the_teacher_found_likely(make):
    request = make(divergence="forward_kl", top_k=5).loss().needs
    assert (request.names, request.temperature) == ({"logprobs_at"}, 0.7)
    assert request.arguments == {"ids": "teacher_topk_ids"}


def test_sampled_reverse_kl_is_an_advantage_a_token(make, batch):
    algorithm = make()
    batch.token_data |= {"trainer_logprobs": drawn(batch, seed=3), "teacher_logprobs": drawn(batch, seed=4)}
    derived = algorithm.advantages(batch, 1)
    wanted = batch.token_data["teacher_logprobs"] - batch.token_data["trainer_logprobs"]
    torch.testing.assert_close(derived.token_data["advantages"], wanted.float())
    mean = -wanted[batch.loss_mask].mean().item()
    assert derived.metrics["distillation/reverse_kl"].value == pytest.approx(mean)
    batch.token_data |= derived.token_data
    loss = algorithm.loss()
    logprobs = batch.token_data["trainer_logprobs"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss({"logprobs": logprobs}, loss.prepare(batch)).total, logprobs)
    torch.testing.assert_close(gradient, -wanted / batch.loss_mask.sum(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("divergence", ["sampled_reverse_kl", "forward_kl"])
def test_each_teacher_is_asked_about_its_data_sources(make, divergence):
    algorithm = make(teachers={"maths": ["gsm8k", "math"], "code": ["mbpp"]}, divergence=divergence)
    graph = trace(algorithm.flow, ROLES)
    asked = {node.role: node.arguments for node in graph.nodes if node.role in ("maths", "code")}
    assert [arguments["data_sources"] for arguments in asked.values()] == [["gsm8k", "math"], ["mbpp"]]
    [applied] = graph.calls("function.apply")
    assert applied.arguments["data_sources"] == ["gsm8k", "math", "mbpp"]
    single = trace(make(divergence=divergence).flow, ROLES)
    assert not single.calls("function.apply")
    assert all("data_sources" not in node.arguments for node in single.nodes)


def test_what_several_teachers_say_is_put_together(make, batch):
    algorithm = make(teachers={"maths": ["a"], "code": ["b"]}, divergence="jsd", top_k=3)
    first = batch.sequence_index < 2
    ids = torch.arange(batch.num_tokens * 3).reshape(-1, 3)
    logprobs = batch.token_data["teacher_topk_logprobs"]
    for name, own in (("maths", first), ("code", ~first)):
        batch.token_data[f"{name}_topk_ids"] = torch.where(own[:, None], ids, 0)
        batch.token_data[f"{name}_topk_logprobs"] = torch.where(own[:, None], logprobs, 0.0)
    derived = algorithm.advantages(batch, 1)
    assert torch.equal(derived.token_data["teachers_topk_ids"], ids)
    torch.testing.assert_close(derived.token_data["teachers_topk_logprobs"], logprobs)
    assert algorithm.loss().needs.arguments == {"ids": "teachers_topk_ids"}


def test_samples_without_a_teacher_are_left_out(make_group):
    samples = make_group("a", [0.0, 0.0])
    assert taught(samples, ["gsm8k"]) == []
    assert taught(samples, [""]) == samples


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teachers": {}}, "at least 1"),
        ({"teachers": {"maths": [], "code": ["mbpp"]}}, r"teachers\.maths is an empty list.*name the data sources"),
        ({"teachers": {"maths": ["x"], "code": ["x"]}}, "data source 'x' has 2 teachers"),
        ({"top_k": 0}, "greater than or equal to 1"),
        ({"jsd_beta": 1.0}, "less than 1"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValidationError, match=message):
        DistillationOptions(**options)
