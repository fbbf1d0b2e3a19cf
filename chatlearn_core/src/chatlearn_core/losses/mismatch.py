"""How far the generator's logprobs are from the trainer's for the same tokens and weights.

A gap here biases every policy gradient and is a common, silent cause of collapse; it is measured every step.
"""

from __future__ import annotations

import math

from torch import Tensor

from chatlearn_core.losses.kl import kl_estimate
from chatlearn_core.types import Metric, Metrics

OUTLIER_RATIO = 2.0
"""Ratios outside [1/2, 2] are what masked importance sampling with its usual threshold leaves out."""


def mismatch_metrics(trainer_logprobs: Tensor, generator_logprobs: Tensor, loss_mask: Tensor) -> Metrics:
    """Differences over the masked tokens.

    Args:
        trainer_logprobs: [T] under the weights that sampled.
        generator_logprobs: [T] of the sampled tokens, same basis.
        loss_mask: [T] bool.

    Returns:
        ``mismatch/prob_diff_{mean,max}``, ``mismatch/logprob_diff_{mean,max}`` (absolute), and estimates of
        KL(generator ‖ trainer) in nats: ``mismatch/kl`` (k3) and ``mismatch/kl_k1``; ``mismatch/outliers``, the share
        of tokens whose ratio is outside [1/2, 2]. Empty if nothing is masked.
    """
    trainer = trainer_logprobs.detach()[loss_mask].double()
    generator = generator_logprobs.detach()[loss_mask].double()
    count = trainer.numel()
    if not count:
        return {}
    prob_diff = (trainer.exp() - generator.exp()).abs()
    logprob_diff = (trainer - generator).abs()
    return {
        "mismatch/prob_diff_mean": Metric(prob_diff.sum().item(), count),
        "mismatch/prob_diff_max": Metric(prob_diff.max().item(), reducer="max"),
        "mismatch/logprob_diff_mean": Metric(logprob_diff.sum().item(), count),
        "mismatch/logprob_diff_max": Metric(logprob_diff.max().item(), reducer="max"),
        "mismatch/outliers": Metric((logprob_diff > math.log(OUTLIER_RATIO)).sum().item(), count),
        "mismatch/kl": Metric(kl_estimate(generator, trainer, "k3").sum().item(), count),
        "mismatch/kl_k1": Metric(kl_estimate(generator, trainer, "k1").sum().item(), count),
    }
