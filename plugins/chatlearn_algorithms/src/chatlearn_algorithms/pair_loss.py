"""The base of losses on pairs of completions: selection of pairs, weights, and metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from chatlearn_algorithms.preference_options import Pairing
from chatlearn_core.exceptions import DataError
from chatlearn_core.protocols.loss import LossOutput, Unit
from chatlearn_core.types import Derived, Metric, Metrics, OutputRequest, Outputs, TrainBatch
from chatlearn_losses import Pairs, best_and_worst, groups, ordered_pairs, sequence_means

RANK = "rank"
"""Key in ``sequence_data``: larger for a better completion."""
PROMPT_WEIGHT = "prompt_weight"
"""Key in ``sequence_data``: weight of a sequence's prompt in the mini-batch."""
NOT_COMPARED = "not_compared"
"""Exclusion of a completion in no pair: the other one is excluded, or it is neither the best nor the worst."""


@dataclass(slots=True, frozen=True)
class PairLoss:
    """The mean over prompts of the mean of ``losses``, which a subclass defines, over a prompt's pairs.

    Attributes:
        temperature: divides the logits.
    """

    temperature: float = 1.0

    @property
    def needs(self) -> OutputRequest:
        return OutputRequest(frozenset({"logprobs"}), self.temperature)

    @property
    def unit(self) -> Unit:
        return "pair"

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Add ``prompt_weight``: 1 over the number of prompts that have a pair."""
        ranks = _ranks(batch)
        num_prompts = sum(
            best_and_worst([float(ranks[i]) for i in one]) is not None for one in groups(batch.group_index)
        )
        weights = torch.full((batch.num_sequences,), 1.0 / max(1, num_prompts), device=ranks.device)
        return replace(batch, sequence_data=batch.sequence_data | {PROMPT_WEIGHT: weights})

    def scores(self, outputs: Outputs, batch: TrainBatch) -> Tensor:
        """[S] the compared numbers, larger for completions that the policy prefers."""
        raise NotImplementedError

    def losses(self, scores: Tensor, pairs: Pairs, outputs: Outputs, batch: TrainBatch) -> Tensor:
        """[N] the loss of each pair."""
        raise NotImplementedError

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        """The loss of one micro-batch of whole prompts."""
        scores = self.scores(outputs, batch)
        pairs = ordered_pairs(batch.group_index, _ranks(batch))
        losses = self.losses(scores, pairs, outputs, batch)
        weights = batch.sequence_data[PROMPT_WEIGHT][pairs.chosen] * pairs.weights
        return LossOutput((weights * losses).sum(), pair_metrics(scores.detach(), pairs))


def pair_metrics(scores: Tensor, pairs: Pairs) -> Metrics:
    """``accuracy`` (pairs of which the chosen completion has the higher score; equal scores count one half), ``margin``
    (mean difference), ``chosen_score`` and ``rejected_score``: means over prompts.
    """
    chosen, rejected = scores[pairs.chosen].double(), scores[pairs.rejected].double()
    weights = pairs.weights.double()
    count = float(weights.sum())

    def mean(values: Tensor) -> Metric:
        return Metric(float((weights * values).sum()), count)

    return {
        "accuracy": mean(0.5 * ((chosen > rejected).double() + (chosen >= rejected).double())),
        "margin": mean(chosen - rejected),
        "chosen_score": mean(chosen),
        "rejected_score": mean(rejected),
    }


def derive_pairs(batch: TrainBatch, ranks: Tensor, pairing: Pairing, tie: str = NOT_COMPARED) -> Derived:
    """Exclude completions in no pair, so that losses compare all that remain.

    Args:
        batch: whole groups.
        ranks: [S]
        pairing: how pairs are chosen.
        tie: exclusion of a group's completions if there are several and all have the same rank.
    """
    exclusions: dict[str, str] = {}
    for members, ends in ranked_groups(batch, ranks):
        if ends is None:
            reason = tie if len(members) > 1 else NOT_COMPARED
            exclusions |= {batch.sample_ids[i]: reason for i in members}
        elif pairing == "best_worst":
            exclusions |= {batch.sample_ids[i]: NOT_COMPARED for i in members if i not in ends}
    return Derived(sequence_data={RANK: ranks}, exclusions=exclusions)


def ranked_groups(batch: TrainBatch, ranks: Tensor) -> list[tuple[list[int], tuple[int, int] | None]]:
    """Return each prompt's sequences with the best and the worst of them, which are None if all ranks are equal.

    Args:
        ranks: [S]
    """
    values = ranks.tolist()
    found: list[tuple[list[int], tuple[int, int] | None]] = []
    for members in groups(batch.group_index):
        ends = best_and_worst([values[i] for i in members])
        found.append((members, None if ends is None else (members[ends[0]], members[ends[1]])))
    return found


def without(batch: TrainBatch, excluded: Derived) -> TrainBatch:
    """Return the batch without the excluded sequences."""
    kept = [i for i, sample in enumerate(batch.sample_ids) if sample not in excluded.exclusions]
    return batch.select(kept)


def mean_logprobs(outputs: Outputs, batch: TrainBatch) -> Tensor:
    """[S] mean logprob of each completion's tokens."""
    return sequence_means(outputs["logprobs"], batch.loss_mask, batch.sequence_index, batch.num_sequences)


def _ranks(batch: TrainBatch) -> Tensor:
    if RANK not in batch.sequence_data:
        raise DataError(
            f"completions are compared by sequence_data {RANK!r}, which these samples do not have (the first is "
            f"{next(iter(batch.sample_ids), 'none')!r}): an algorithm's advantages or the kind of its examples write it"
        )
    return batch.sequence_data[RANK]
