from __future__ import annotations

import math

import pytest
import torch

from chatlearn_losses.kl import MAX_KL, full_kl, kl_estimate, topk_kl

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
    assert estimate.tolist() == [MAX_KL, MAX_KL]
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


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("sampled_from", ["the policy", "older weights"])
def test_weighted_estimates_have_the_gradient_of_the_true_kl(estimator, sampled_from):
    """The expectation over the sampled token is taken exactly, term by term over the vocabulary: Σ q_v ρ_v k_v."""
    logits, reference = (values.requires_grad_() for values in distributions())
    (true_gradient,) = torch.autograd.grad(full_kl(logits, reference.detach()), logits)
    policy = logits.log_softmax(-1)
    older = (logits.detach() + torch.tensor([0.3, -0.2, 0.0, 0.5, -0.4])).log_softmax(-1)
    old = policy.detach() if sampled_from == "the policy" else older
    weighted = kl_estimate(
        policy, reference.detach().log_softmax(-1), estimator, clamp="none", weights=(policy - old).exp()
    )
    expectation = (old.exp() * weighted).sum()
    (gradient,) = torch.autograd.grad(expectation, logits)
    torch.testing.assert_close(expectation, full_kl(logits, reference))
    torch.testing.assert_close(gradient, true_gradient)


def test_expected_gradients_without_a_weight():
    """What the documentation says of them: k1 has none, k3 that of the other direction."""
    logits, reference = (values.requires_grad_() for values in distributions())
    policy, other = logits.log_softmax(-1), reference.detach().log_softmax(-1)
    (other_direction,) = torch.autograd.grad(full_kl(reference.detach(), logits), logits, retain_graph=True)
    (true_gradient,) = torch.autograd.grad(full_kl(logits, reference.detach()), logits, retain_graph=True)
    for estimator, expected in (("k1", torch.zeros_like(logits)), ("k3", other_direction)):
        expectation = (policy.detach().exp() * kl_estimate(policy, other, estimator)).sum()
        (gradient,) = torch.autograd.grad(expectation, logits, retain_graph=True)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-12)
    assert (true_gradient - other_direction).abs().max() > 0.1


@pytest.mark.parametrize(
    ("clamp", "estimator", "expected"),
    [
        # x is -30 and then 5: k1 = 30, -5; k2 = 450, 12.5; k3 = e^-30 + 29, e^5 - 6 = 142.4.
        ("none", "k1", [30.0, -5.0]),
        ("none", "k2", [450.0, 12.5]),
        ("none", "k3", [29.0, math.exp(5) - 6]),
        ("none", "k3_straight_through", [29.0, math.exp(5) - 6]),
        ("k3", "k1", [30.0, -5.0]),
        ("k3", "k2", [450.0, 12.5]),
        ("k3", "k3", [10.0, 10.0]),
        ("all", "k1", [10.0, -5.0]),
        ("all", "k2", [10.0, 10.0]),
        ("all", "k3", [10.0, 10.0]),
        ("all", "k3_straight_through", [10.0, 10.0]),
    ],
)
def test_what_is_cut(clamp, estimator, expected):
    reference = torch.tensor([-31.0, 4.0], dtype=torch.float64)
    estimate = kl_estimate(torch.full((2,), -1.0, dtype=torch.float64), reference, estimator, clamp=clamp)
    assert estimate.tolist() == pytest.approx(expected)


def test_a_weighted_estimate_is_cut_as_a_product():
    estimates = [
        kl_estimate(torch.zeros(1), torch.full((1,), -1.0), "k1", clamp=clamp, weights=torch.full((1,), 40.0)).item()
        for clamp in ("none", "k3", "all")
    ]
    assert estimates == [40.0, 40.0, 10.0]


def test_full_kl_with_excluded_tokens_and_half_precision():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    # Uniform over 2 against uniform over 3.
    assert full_kl(logits, torch.zeros(1, 3)).item() == pytest.approx(math.log(3 / 2))
    assert full_kl(logits.bfloat16(), torch.zeros(1, 3).bfloat16()).dtype == torch.float32
    leaf = logits.clone().requires_grad_()
    full_kl(leaf, torch.zeros(1, 3)).sum().backward()
    assert torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_kl_over_the_most_likely_tokens_is_that_of_k_classes_and_a_rest(k):
    """Against a loop over the classes; with k the vocabulary's size it is the whole KL, and so is its gradient."""
    generator = torch.Generator().manual_seed(k)
    logits, reference = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    ids = reference.topk(k, dim=-1).indices
    policy, other = (of.log_softmax(-1) for of in (logits, reference))
    found = topk_kl(policy.gather(-1, ids), other.gather(-1, ids))
    for row in range(5):
        chosen = ids[row].tolist()
        p, q = policy[row].exp().tolist(), other[row].exp().tolist()
        classes = [(p[v], q[v]) for v in chosen]
        if k < 7:
            classes.append(tuple(sum(of[v] for v in range(7) if v not in chosen) for of in (p, q)))
        expected = sum(of_policy * math.log(of_policy / of_reference) for of_policy, of_reference in classes)
        assert found[row].item() == pytest.approx(expected, abs=1e-7)
    whole = full_kl(logits, reference)
    assert (found <= whole + 1e-7).all()
    if k == 7:
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-7)
        (gradient,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
        (expected_gradient,) = torch.autograd.grad(whole.sum(), logits)
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-6)


def test_the_kl_over_the_most_likely_tokens_has_the_gradient_of_its_value():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(5), dtype=torch.float64, requires_grad=True)
    reference = torch.randn(4, 9, generator=torch.Generator().manual_seed(6), dtype=torch.float64).log_softmax(-1)
    ids = reference.topk(3, dim=-1).indices
    assert torch.autograd.gradcheck(
        lambda of: topk_kl(of.log_softmax(-1).gather(-1, ids), reference.gather(-1, ids)), logits
    )
