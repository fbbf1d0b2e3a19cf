from __future__ import annotations

import math

import pytest
import torch

from chatlearn_core.losses.kl import MAX_K3, full_kl, kl_estimate

POLICY = [-1.0, -0.5, -2.0]
REFERENCE = [-1.5, -0.5, -0.7]


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        # x = ref - pi; slope is the derivative by pi: that of -x is 1, of x^2/2 is -x, of e^x - x - 1 is 1 - e^x.
        ("k1", lambda x: -x, lambda x: 1.0),
        ("k2", lambda x: x * x / 2, lambda x: -x),
        ("k3", lambda x: math.exp(x) - x - 1, lambda x: 1 - math.exp(x)),
        ("k1_straight_through", lambda x: -x, lambda x: -x),
        ("k3_straight_through", lambda x: math.exp(x) - x - 1, lambda x: -x),
    ],
)
def test_value_and_gradient(estimator, value, slope):
    policy = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(policy, torch.tensor(REFERENCE, dtype=torch.float64), estimator)
    estimate.sum().backward()
    xs = [r - p for p, r in zip(POLICY, REFERENCE, strict=True)]
    assert estimate.tolist() == pytest.approx([value(x) for x in xs], abs=1e-12)
    assert policy.grad.tolist() == pytest.approx([slope(x) for x in xs], abs=1e-12)


def test_k3_keeps_its_digits_near_zero():
    # e^x - x - 1 = x^2/2 + ... = 5e-9 at x = 1e-4, below the resolution of exp(x) in float32 (6e-8).
    estimate = kl_estimate(torch.zeros(1), torch.full((1,), 1e-4), "k3")
    assert estimate.item() == pytest.approx(5e-9, rel=0.02)


@pytest.mark.parametrize("estimator", ["k3", "k3_straight_through"])
def test_k3_is_clamped(estimator):
    policy = torch.tensor([-500.0, -30.0], requires_grad=True)
    estimate = kl_estimate(policy, torch.tensor([-1.0, -1.0]), estimator)
    assert estimate.tolist() == [MAX_K3, MAX_K3]
    estimate.sum().backward()
    assert torch.isfinite(policy.grad).all()


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(5, generator=generator).double(), torch.randn(5, generator=generator).double())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased(estimator):
    """The expectation under the policy, taken exactly over a small vocabulary, is the true KL."""
    logits, reference = distributions()
    policy, other = logits.log_softmax(-1), reference.log_softmax(-1)
    expectation = (policy.exp() * kl_estimate(policy, other, estimator)).sum()
    torch.testing.assert_close(expectation, (policy.exp() * (policy - other)).sum())
    torch.testing.assert_close(expectation, full_kl(logits, reference))


@pytest.mark.parametrize("estimator", ["k2", "k1_straight_through", "k3_straight_through"])
def test_expected_gradient_is_that_of_the_true_kl(estimator):
    logits, reference = (values.requires_grad_() for values in distributions())
    (true_gradient,) = torch.autograd.grad(full_kl(logits, reference.detach()), logits)
    policy = logits.log_softmax(-1)
    expectation = (policy.detach().exp() * kl_estimate(policy, reference.detach().log_softmax(-1), estimator)).sum()
    (gradient,) = torch.autograd.grad(expectation, logits)
    torch.testing.assert_close(gradient, true_gradient)


def test_full_kl_with_excluded_tokens_and_half_precision():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    # Uniform over 2 against uniform over 3.
    assert full_kl(logits, torch.zeros(1, 3)).item() == pytest.approx(math.log(3 / 2))
    assert full_kl(logits.bfloat16(), torch.zeros(1, 3).bfloat16()).dtype == torch.float32
    leaf = logits.clone().requires_grad_()
    full_kl(leaf, torch.zeros(1, 3)).sum().backward()
    assert torch.isfinite(leaf.grad).all()
