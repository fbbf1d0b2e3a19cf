"""Differences between the generator's and the trainer's logprobs for the same tokens and weights.

A difference biases every policy gradient and is a common, silent cause of collapse; it is measured in every step.
"""

from __future__ import annotations

import math

from torch import Tensor

from chatlearn_core.types import Metric, Metrics

OUTLIER_RATIO = 2.0
"""Ratios outside [1/2, 2] are outliers, as in masked importance sampling with its usual threshold."""


def mismatch_metrics(trainer_logprobs: Tensor, generator_logprobs: Tensor, loss_mask: Tensor) -> Metrics:
    """Differences over the masked tokens.

    Args:
        trainer_logprobs: [T] logprobs under the weights that sampled.
        generator_logprobs: [T] logprobs of the sampled tokens, in the same basis.
        loss_mask: [T] bool.

    Returns:
        ``mismatch/prob_diff_{mean,max}``, ``mismatch/logprob_diff_{mean,max}`` (absolute), and estimates of
        KL(generator ‖ trainer) in nats: ``mismatch/kl`` (k3) and ``mismatch/kl_k1``; ``mismatch/outliers``, the share
        of tokens whose ratio is outside [1/2, 2]. None of them is clipped. ``mismatch/infinite``: the share of tokens
        with an infinite difference, because one of the two gives them zero probability; they count as outliers, and
        are left out of the means of logprobs and KL, which would otherwise be infinite. Empty if the mask is empty.
    """
    trainer = trainer_logprobs.detach()[loss_mask].double()
    generator = generator_logprobs.detach()[loss_mask].double()
    count = trainer.numel()
    if not count:
        return {}
    prob_diff = (trainer.exp() - generator.exp()).abs()
    log_ratio = trainer - generator
    k3 = log_ratio.expm1() - log_ratio  # J. Schulman, "Approximating KL divergence", 2020
    finite = k3.isfinite()
    num_finite = int(finite.sum())
    k3, k1 = k3[finite], -log_ratio[finite]
    metrics: Metrics = {
        "mismatch/prob_diff_mean": Metric(prob_diff.sum().item(), count),
        "mismatch/prob_diff_max": Metric(prob_diff.max().item(), reducer="max"),
        "mismatch/outliers": Metric((k1.abs() > math.log(OUTLIER_RATIO)).sum().item() + count - num_finite, count),
        "mismatch/infinite": Metric(count - num_finite, count),
    }
    if num_finite:
        metrics |= {
            "mismatch/logprob_diff_mean": Metric(k1.abs().sum().item(), num_finite),
            "mismatch/logprob_diff_max": Metric(k1.abs().max().item(), reducer="max"),
            "mismatch/kl": Metric(k3.sum().item(), num_finite),
            "mismatch/kl_k1": Metric(k1.sum().item(), num_finite),
        }
    return metrics
