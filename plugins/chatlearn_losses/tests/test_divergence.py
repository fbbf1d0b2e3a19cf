"""By closed forms over whole vocabularies, and finite differences in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical, kl_divergence

from chatlearn_losses import generalised_jsd


def logprobs(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


STUDENT, TEACHER = logprobs(0, 5, 7), logprobs(1, 5, 7)


def by_torch(beta: float) -> torch.Tensor:
    """torch's own KL of categorical distributions."""
    student, teacher = Categorical(logits=STUDENT), Categorical(logits=TEACHER)
    mixture = Categorical(probs=(1 - beta) * student.probs + beta * teacher.probs)
    if beta in (0.0, 1.0):
        return kl_divergence(teacher, student) if beta == 0.0 else kl_divergence(student, teacher)
    return beta * kl_divergence(teacher, mixture) + (1 - beta) * kl_divergence(student, mixture)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_the_whole_vocabulary_gives_the_divergence_itself(beta):
    torch.testing.assert_close(generalised_jsd(STUDENT, TEACHER, beta), by_torch(beta), rtol=0, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_rest_counts_as_one_token(beta):
    """Two tokens and the rest are a distribution over three."""
    merged = [torch.cat([p[:, :2], p[:, 2:].logsumexp(-1, keepdim=True)], -1) for p in (STUDENT, TEACHER)]
    found = generalised_jsd(STUDENT[:, :2], TEACHER[:, :2], beta)
    torch.testing.assert_close(found, generalised_jsd(*merged, beta), rtol=0, atol=1e-5)


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 6))
def test_it_is_not_negative_and_grows_with_what_is_seen(seed, beta, k):
    student, teacher = logprobs(seed, 3, 7), logprobs(seed + 1, 3, 7)
    fewer, more = (generalised_jsd(student[:, :n], teacher[:, :n], beta) for n in (k, k + 1))
    assert (fewer >= -1e-6).all()
    assert (more >= fewer - 1e-6).all()


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("k", [3, 6])
def test_gradients_by_finite_differences(beta, k):
    logits = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: generalised_jsd(x.log_softmax(-1)[:, :k], TEACHER[:2, :k], beta), (logits,)
    )


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_equal_distributions_have_none_and_no_gradient(beta):
    student = STUDENT[:, :4].clone().requires_grad_()
    divergence = generalised_jsd(student, STUDENT[:, :4], beta)
    (gradient,) = torch.autograd.grad(divergence.sum(), student)
    assert divergence.abs().max() < 1e-9
    # Of the two directions the reverse one moves mass, whose total is kept: sums over the vocabulary vanish.
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_excluded_tokens_stay_finite(beta):
    student = torch.tensor([[0.0, -torch.inf]], requires_grad=True)
    divergence = generalised_jsd(student, torch.tensor([[-torch.inf, 0.0]]), beta)
    divergence.sum().backward()
    assert torch.isfinite(divergence).all()
    assert torch.isfinite(student.grad).all()
