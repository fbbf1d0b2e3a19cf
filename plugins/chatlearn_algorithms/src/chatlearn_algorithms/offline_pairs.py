"""The base of algorithms that learn from a dataset of ranked completions: flow, exclusions, evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from chatlearn_algorithms.pair_loss import RANK, PairLoss, derive_pairs, without
from chatlearn_algorithms.preference_options import PairOptions, ReferencedPairOptions
from chatlearn_core.protocols import Algorithm, AlgorithmContext, RoleUpdate
from chatlearn_core.types import Derived, Metric, Metrics, Outputs, TrainBatch


class OfflinePairs(Algorithm):
    """Learns from the ranked completions of the dataset; a subclass defines the loss.

    Evaluation measures held-out pairs without a generator. Where a generator and a reward are configured, it samples
    and scores prompts instead.
    """

    input = "ranked_completions"
    output: ClassVar[str] = "logprobs"
    """Outputs of the policy that the loss reads."""

    def __init__(self, options: PairOptions, context: AlgorithmContext) -> None:
        self.options = options
        self.context = context
        self.policy = options.roles.policy
        samples = {"generator", "reward"} <= set(context.roles.values())
        self.evaluation_input = None if samples else self.input

    def loss(self) -> PairLoss:
        """The loss with the configured options."""
        raise NotImplementedError

    def flow(self, completions: Any, m: Any) -> Any:
        """Compute the reference's logprobs, if the loss needs them."""
        return m.join(completions, *self._reference(completions, m))

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """Exclude completions that are in no pair."""
        return derive_pairs(batch, batch.sequence_data[RANK], self.options.pairing)

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        """The policy alone."""
        return [RoleUpdate(self.options.roles.policy, self.loss())]

    def evaluation(self, completions: Any, m: Any) -> Any:
        """Compute the logprobs of held-out completions, by policy and reference."""
        policy = getattr(m, self.options.roles.policy)
        arguments = {"temperature": 1.0} if self.output == "logprobs" else {}
        found = getattr(policy, self.output)(completions, **arguments)
        return m.join(completions, found, *self._reference(completions, m))

    def evaluation_metrics(self, batch: TrainBatch) -> Metrics:
        """Return ``loss`` of the held-out prompts, and the loss's metrics: ``accuracy`` of pairs, ``margin``."""
        batch = without(batch, self.advantages(batch, 0))
        if not batch.num_sequences:
            return {}
        loss = self.loss()
        name = f"{self.options.roles.policy}_{self.output}"
        values = (batch.token_data if self.output == "logprobs" else batch.sequence_data)[name]
        outputs: Outputs = {self.output: values}
        with torch.no_grad():
            found = loss(outputs, loss.prepare(batch))
        num_prompts = len(set(batch.group_index.tolist()))
        return {"loss": Metric(float(found.total) * num_prompts, num_prompts), **found.metrics}

    def _reference(self, completions: Any, m: Any) -> list[Any]:
        options = self.options
        if not isinstance(options, ReferencedPairOptions):
            return []
        reference = getattr(m, options.roles.reference)
        return [reference.logprobs(completions, temperature=1.0, cache=options.cache_reference)]
