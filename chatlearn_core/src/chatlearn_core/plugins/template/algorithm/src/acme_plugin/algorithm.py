"""The algorithm ``acme``: its flow, its advantages, and which role learns by which loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from chatlearn_core.protocols import AlgorithmContext, InputKind, Loss
from chatlearn_core.types import Metric, Metrics, Sample

from acme_plugin.loss import PolicyGradientLoss
from acme_plugin.options import AcmeOptions


class Acme:
    """REINFORCE with a leave-one-out baseline (RLOO, arXiv 2402.14740, section 2).

    The advantage of a completion is its reward less the mean reward of the others of its group. On-policy: with more
    than one update a step (``train.mini_batches``, ``train.epochs``) later updates are biased.
    """

    def __init__(self, options: AcmeOptions, context: AlgorithmContext) -> None:
        self.options = options
        self.context = context

    @property
    def input(self) -> InputKind:
        return "prompts"

    @property
    def group_size(self) -> int:
        return self.options.group_size

    def flow(self, prompts: Any, m: Any) -> Any:
        """Traced once, before anything runs: ``m`` has a method for everything that a role can do."""
        samples = m.generator.generate(prompts)
        return m.join(samples, m.reward.score(samples))

    def prepare_samples(self, samples: Sequence[Sample]) -> Metrics:
        """Add ``advantages``, in place; a completion without another to compare with is excluded, and counted."""
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            if sample.exclusion is None and not sample.loss_mask.any():
                sample.exclusion = "empty_completion"
            if sample.exclusion is None:
                groups.setdefault(sample.group_id, []).append(sample)
        rewards: list[float] = []
        for members in groups.values():
            scores = np.array([outcome(sample) for sample in members])
            rewards += scores.tolist()
            if len(members) < 2:
                members[0].exclusion = "group_too_small"
                continue
            baselines = (scores.sum() - scores) / (len(members) - 1)
            for sample, advantage in zip(members, scores - baselines, strict=True):
                sample.token_data["advantages"] = np.where(sample.loss_mask, advantage, 0.0).astype(np.float32)
        return {"reward": Metric(sum(rewards), len(rewards))} if rewards else {}

    def losses(self) -> Mapping[str, Loss]:
        return {"trainer": PolicyGradientLoss(self.context.basis.temperature)}


def outcome(sample: Sample) -> float:
    """The reward of a sample that was not excluded: the executor excludes those that the reward could not judge."""
    assert sample.reward is not None, f"sample {sample.id} has no reward: the flow joins m.reward.score(samples)"
    assert sample.reward.value is not None, f"sample {sample.id} has no reward: {sample.reward.error}"
    return sample.reward.value
