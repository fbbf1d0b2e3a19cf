"""Estimators of KL(π ‖ reference) from logprobs of tokens sampled from π, and the exact one over the vocabulary.

With x = reference − π: k1 = −x is unbiased and noisy; k2 = x²/2 is biased, and its gradient is that of the true KL;
k3 = eˣ − x − 1 is unbiased and never negative (J. Schulman, "Approximating KL divergence", 2020). The straight-through
variants report one estimator's value and send k2's gradient.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "k1_straight_through", "k3_straight_through"]

MAX_LOG_DIFFERENCE = 20.0
"""|x| beyond this would overflow k3's exponential in float32 sums."""
MAX_K3 = 10.0
"""One token that the reference finds far more likely than the policy must not dominate a batch: eˣ is unbounded."""


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(π ‖ reference).

    Args:
        logprobs: [...] of tokens sampled from π, with gradient where the KL is a loss.
        reference_logprobs: [...] of the same tokens, of the same basis.
        estimator: see the module; k3 clamps x to ±20 and its value to at most 10, where its gradient is 0.

    Returns:
        [...] nats.
    """
    x = reference_logprobs - logprobs
    if estimator == "k1":
        return -x
    k2 = 0.5 * x.square()
    if estimator == "k2":
        return k2
    if estimator == "k1_straight_through":
        return _value_of(-x, k2)
    bounded = x.clamp(-MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE)
    # expm1(x) - x keeps the digits that exp(x) - x - 1 loses near 0, where most tokens are.
    k3 = (bounded.expm1() - bounded).clamp(max=MAX_K3)
    return k3 if estimator == "k3" else _value_of(k3, k2)


def full_kl(logits: Tensor, reference_logits: Tensor) -> Tensor:
    """Exact KL(π ‖ reference) = Σ_v π_v (log π_v − log reference_v).

    Args:
        logits: [..., V] of the policy.
        reference_logits: [..., V]

    Returns:
        [...] nats, float32 (float64 for float64 input). A vocabulary entry that π excludes (−inf) adds nothing.
    """
    dtype = logits.dtype if logits.dtype.itemsize > 4 else None
    policy = (logits if dtype else logits.float()).log_softmax(-1)
    reference = (reference_logits if dtype else reference_logits.float()).log_softmax(-1)
    probabilities = policy.exp()
    difference = (policy - reference).masked_fill(probabilities == 0, 0.0)
    return (probabilities * difference).sum(-1)


def _value_of(value: Tensor, gradient: Tensor) -> Tensor:
    """A tensor that equals ``value`` and has the gradient of ``gradient``."""
    return value.detach() + gradient - gradient.detach()
