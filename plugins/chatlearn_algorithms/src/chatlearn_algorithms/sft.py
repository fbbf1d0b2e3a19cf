"""Supervised fine-tuning: maximise the likelihood of demonstrated completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chatlearn_algorithms.group_advantages import EMPTY_COMPLETION
from chatlearn_algorithms.sft_options import SFTOptions
from chatlearn_core.losses import AggregationMode, aggregation_weights
from chatlearn_core.protocols.algorithm import AlgorithmContext, InputKind
from chatlearn_core.protocols.loss import Loss, LossOutput, Unit
from chatlearn_core.types import Metric, Metrics, OutputRequest, Outputs, Sample, TrainBatch


@dataclass(slots=True, frozen=True)
class SFTLoss:
    """−Σ w·π over the masked tokens: cross-entropy, at temperature 1."""

    aggregation: AggregationMode = "token_mean"

    @property
    def needs(self) -> OutputRequest:
        return OutputRequest(frozenset({"logprobs"}))

    @property
    def unit(self) -> Unit:
        return "sequence"

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Add ``loss_weight``."""
        weights = aggregation_weights(batch, self.aggregation)
        return replace(batch, token_data=batch.token_data | {"loss_weight": weights})

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        """The loss of one micro-batch; ``sft/loss`` is the mean over tokens, nats, in every aggregation mode."""
        logprobs, mask = outputs["logprobs"], batch.loss_mask
        if not batch.num_sequences:
            return LossOutput(logprobs.sum())
        negative = -torch.where(mask, logprobs, logprobs.new_zeros(()))
        mean = Metric(negative.detach().sum(dtype=torch.float64).item(), int(mask.sum()))
        return LossOutput((batch.token_data["loss_weight"] * negative).sum(), {"sft/loss": mean})


class SFT:
    """Trains the role ``trainer`` on demonstrations."""

    def __init__(self, options: SFTOptions, context: AlgorithmContext) -> None:
        self.options = options
        self.context = context

    @property
    def input(self) -> InputKind:
        return "demonstrations"

    @property
    def group_size(self) -> int:
        return 1

    @property
    def policy(self) -> str:
        return "trainer"

    def flow(self, demonstrations: Any, m: Any) -> Any:
        """Demonstrations are training samples as they are."""
        return demonstrations

    def prepare_samples(self, samples: Sequence[Sample]) -> Metrics:
        """Exclude demonstrations without a token to learn; count the tokens of the others."""
        for sample in samples:
            if sample.exclusion is None and not sample.loss_mask.any():
                sample.exclusion = EMPTY_COMPLETION
        num_tokens = sum(int(sample.loss_mask.sum()) for sample in samples if sample.exclusion is None)
        return {"sft/tokens": Metric(num_tokens, reducer="sum")}

    def losses(self) -> Mapping[str, Loss]:
        """Cross-entropy, for the role ``trainer``."""
        return {"trainer": SFTLoss(self.options.aggregation)}
