"""Estimators of KL(π ‖ reference) from logprobs of tokens sampled from π, and the exact one over the vocabulary.

With x = reference − π: k1 = −x is unbiased and noisy; k2 = x²/2 is biased, and its gradient is that of the true KL;
k3 = eˣ − x − 1 is unbiased and never negative (J. Schulman, "Approximating KL divergence", 2020). The straight-through
variants report one estimator's value and send k2's gradient.

An unbiased value does not make an unbiased gradient. The expectation of an estimator k depends on π twice, through k
and through the tokens that π samples, and the gradient of k alone misses the second part:

    ∇ E_π[k] = E_π[∇k + k ∇log π]

∇k1 = ∇log π has expectation 0; ∇k3 = (1 − eˣ) ∇log π has expectation ∇KL(reference ‖ π), the other direction. A weight
restores the second part (``KLWeight``), and then k1 and k3 both have the gradient of KL(π ‖ reference).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "k1_straight_through", "k3_straight_through"]
KLWeight = Literal["none", "ratio", "generator_ratio", "score"]
"""Factor of a token's estimate, with gradient: ``ratio``: ρ = exp(π − old) (TRL's default; DeepSeek-V3.2,
arXiv 2512.02556); ``generator_ratio``: exp(π − generator) (NeMo-RL's on-policy approximation); ``score``: exp(π −
sg(π)), which is 1 and has the gradient of log π (NeMo-RL's default), correct on samples of the current policy π."""
KLClamp = Literal["k3", "all", "none"]
"""Which estimates are clipped: ``k3``: only k3, which is exponential: x to ±20 and the value to 10 (verl); ``all``: x
to ±20 and every weighted estimate to ±10 (NeMo-RL, OpenRLHF); ``none``: none (TRL). A clipped estimate has gradient 0.
"""

MAX_LOG_DIFFERENCE = 20.0
"""|x| beyond this would overflow k3's exponential in float32 sums."""
MAX_KL = 10.0
"""Bound of a token's estimate: eˣ is unbounded, so a single token could otherwise dominate a batch."""
MIN_REST = 1e-8
"""Least probability of all other tokens together: float32 sums of probabilities come no closer to 1."""


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    estimator: KLEstimator,
    *,
    clamp: KLClamp = "k3",
    weights: Tensor | None = None,
) -> Tensor:
    """Per-token estimate of KL(π ‖ reference).

    Args:
        logprobs: [...] of tokens sampled from π, with gradient where the KL is a loss.
        reference_logprobs: [...] of the same tokens, of the same basis.
        estimator: see the module.
        clamp: see ``KLClamp``. Diagnostics use ``none``, because they should show extreme values.
        weights: [...] with gradient, see ``KLWeight``; None for 1. The product is clipped.

    Returns:
        [...] nats.
    """
    x = reference_logprobs - logprobs
    if clamp == "all" or (clamp == "k3" and estimator == "k3"):
        x = x.clamp(-MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE)
    estimate = _estimate(x, estimator, clamp)
    if weights is not None:
        estimate = weights * estimate
    if clamp == "all":
        return estimate.clamp(-MAX_KL, MAX_KL)
    return estimate.clamp(max=MAX_KL) if clamp == "k3" and estimator == "k3" else estimate


def _estimate(x: Tensor, estimator: KLEstimator, clamp: KLClamp) -> Tensor:
    k2 = 0.5 * x.square()
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return k2
    if estimator == "k1_straight_through":
        return _value_of(-x, k2)
    if estimator == "k3":
        return _k3(x)
    if clamp == "none":
        return _value_of(_k3(x), k2)
    return _value_of(_k3(x.clamp(-MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE)).clamp(max=MAX_KL), k2)


def _k3(x: Tensor) -> Tensor:
    """expm1(x) − x keeps the digits that exp(x) − x − 1 loses near 0, where most tokens are."""
    return x.expm1() - x


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


def topk_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL(π ‖ reference) over k tokens and one class for all others: Σ_{v ∈ k} π_v log(π_v / ref_v) + rest.

    A lower bound of the exact KL, and equal to it if the k tokens are the whole vocabulary or have all probability. Its
    gradient is exact, because no part is estimated from a sampled token.

    Args:
        logprobs: [..., k] of the policy, with gradient.
        reference_logprobs: [..., k] of the reference, for the same tokens.

    Returns:
        [...] nats.
    """
    kl = (logprobs.exp() * (logprobs - reference_logprobs)).sum(-1)
    rest, reference_rest = (
        (1.0 - chosen.exp().sum(-1)).clamp(min=MIN_REST) for chosen in (logprobs, reference_logprobs)
    )
    return kl + rest * (rest.log() - reference_rest.log())


def _value_of(value: Tensor, gradient: Tensor) -> Tensor:
    """A tensor that equals ``value`` and has the gradient of ``gradient``."""
    return value.detach() + gradient - gradient.detach()
