"""On-policy distillation (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543): the student samples, teachers correct it
token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chatlearn_algorithms.distillation_options import DistillationOptions
from chatlearn_algorithms.objectives import Clip
from chatlearn_algorithms.policy_loss import PolicyLoss
from chatlearn_algorithms.shared_text import UNMATCHED
from chatlearn_core.protocols import Aggregation, Algorithm, AlgorithmContext, Loss, RoleUpdate
from chatlearn_core.protocols.loss import LossOutput, Unit
from chatlearn_core.types import Derived, Metric, OutputRequest, Outputs, Sample, TrainBatch
from chatlearn_losses import generalised_jsd, masked_difference

TEACHERS = "teachers"
"""Takes the place of the role's name in the outputs of several teachers together."""


@dataclass(slots=True, frozen=True)
class DistillationLoss:
    """Σ w · D over the masked tokens, with D the generalised Jensen-Shannon divergence of eq. 1 in GKD's section 2.

    Attributes:
        beta: 0 for the forward KL(T ‖ S), 1 for the reverse KL(S ‖ T), otherwise the mixture's weight.
        teacher: name in the batch's ``{teacher}_topk_ids`` and ``{teacher}_topk_logprobs``.
    """

    aggregation: Aggregation
    beta: float
    teacher: str = "teacher"
    temperature: float = 1.0

    @property
    def needs(self) -> OutputRequest:
        return OutputRequest(frozenset({"logprobs_at"}), self.temperature, {"ids": f"{self.teacher}_topk_ids"})

    @property
    def reads(self) -> frozenset[str]:
        """What a plugin's aggregation looks at, see ``ReadsSamples``."""
        return self.aggregation.reads

    @property
    def unit(self) -> Unit:
        return self.aggregation.loss_unit

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Add ``loss_weight``."""
        return replace(batch, token_data=batch.token_data | {"loss_weight": self.aggregation(batch)})

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        """The loss of one micro-batch; ``divergence`` is its mean over tokens, nats, in every aggregation."""
        mask = batch.loss_mask
        teacher = batch.token_data[f"{self.teacher}_topk_logprobs"][mask]
        divergences = generalised_jsd(outputs["logprobs_at"][mask], teacher, self.beta)
        mean = Metric(divergences.detach().sum(dtype=torch.float64).item(), int(mask.sum()))
        total = (batch.token_data["loss_weight"][mask] * divergences).sum()
        return LossOutput(total, {"divergence": mean} if batch.num_sequences else {})


class Distillation(Algorithm):
    """Samples with the student, and trains its next-token distributions toward those of a teacher.

    Each data source may have its own teacher.
    """

    def __init__(self, options: DistillationOptions, context: AlgorithmContext) -> None:
        self.options = options
        self.context = context
        self.group_size = options.group_size
        self.policy = options.roles.policy
        self.aggregation = context.aggregation(options.aggregation, options.aggregation_options)
        self.sampled = options.divergence == "sampled_reverse_kl"

    def flow(self, prompts: Any, m: Any) -> Any:
        """Generate, then let each teacher compute its outputs on the samples of its data sources."""
        roles, options = self.options.roles, self.options
        if roles.environment is None:
            samples = getattr(m, roles.generator).generate(prompts)
        else:
            samples = getattr(m, roles.environment).rollout(prompts)
        sources = [source for own in options.teachers.values() for source in own]
        if sources:
            samples = m.apply(f"{__name__}:taught", samples, granularity="sample", data_sources=sources)
        parts = []
        for name, own in options.teachers.items():
            teacher, only = getattr(m, name), own or None
            if options.match == "text":
                samples = teacher.text_logprobs(samples, student=roles.policy, data_sources=only)
            elif self.sampled:
                parts.append(teacher.logprobs(samples, data_sources=only))
            else:
                parts.append(teacher.topk(samples, k=options.top_k, data_sources=only))
        if self.sampled:
            parts.append(getattr(m, roles.policy).logprobs(samples))
        return m.join(samples, *parts)

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """Sum the teachers' outputs, of which all but one are 0 for each sample. For the sampled KL, the advantage of
        token t is log T(t) − log S(t).
        """
        data, teachers = batch.token_data, tuple(self.options.teachers)
        if self.options.match == "text":
            return self._of_text(batch)
        if not self.sampled:
            if len(teachers) == 1:
                return Derived()
            names = ("topk_ids", "topk_logprobs")
            return Derived({f"{TEACHERS}_{name}": _sum([data[f"{one}_{name}"] for one in teachers]) for name in names})
        taught = _sum([data[f"{teacher}_logprobs"] for teacher in teachers])
        advantages = masked_difference(taught, data[f"{self.options.roles.policy}_logprobs"], batch.loss_mask)
        mean = Metric(-float(advantages.double().sum()), float(batch.loss_mask.sum()))
        return Derived({"advantages": advantages.float()}, metrics={"distillation/reverse_kl": mean})

    def _of_text(self, batch: TrainBatch) -> Derived:
        """Every token of a span of n tokens has the advantage (log T(span) − log S(span)) / n."""
        data, teachers = batch.token_data, tuple(self.options.teachers)
        taught, spans = (_sum([data[f"{one}_text_{what}"] for one in teachers]) for what in ("logprobs", "spans"))
        differences = masked_difference(taught, data[f"{self.options.roles.policy}_logprobs"], batch.loss_mask)
        advantages = span_means(differences, spans, batch.sequence_index)
        num_tokens = float(batch.loss_mask.sum())
        num_unmatched = float((spans == UNMATCHED).sum())
        metrics = {
            "distillation/reverse_kl": Metric(-float(advantages.double().sum()), num_tokens),
            "distillation/unmatched_tokens": Metric(num_unmatched, num_unmatched + num_tokens),
        }
        return Derived({"advantages": advantages.float()}, metrics=metrics)

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        """Update only the student."""
        return [RoleUpdate(self.options.roles.policy, self.loss())]

    def loss(self) -> Loss:
        """The loss with the configured options, at the temperature of the samples."""
        options, temperature = self.options, self.context.basis.temperature
        if self.sampled:
            return PolicyLoss(
                Clip(options.clip_low, options.clip_high),
                aggregation=self.aggregation,
                log_entropy=False,
                old_logprobs=f"{options.roles.policy}_logprobs",
                temperature=temperature,
            )
        betas = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": options.jsd_beta}
        teacher = next(iter(options.teachers)) if len(options.teachers) == 1 else TEACHERS
        return DistillationLoss(self.aggregation, betas[options.divergence], teacher, temperature)


def taught(samples: list[Sample], data_sources: Sequence[str]) -> list[Sample]:
    """Return the samples that a teacher teaches."""
    return [sample for sample in samples if sample.prompt.data_source in data_sources]


def span_means(values: torch.Tensor, spans: torch.Tensor, sequence_index: torch.Tensor) -> torch.Tensor:
    """[T] the mean of the values over each token's span; 0 for tokens in no span.

    Args:
        values: [T]
        spans: [T] number of the token's span in its sequence, from 1; 0 or less: in none.
        sequence_index: [T]
    """
    if not len(spans):
        return values
    inside = spans > 0
    key = torch.where(inside, sequence_index * (spans.max() + 1) + spans, 0).long()
    _, place = torch.unique(key, return_inverse=True)
    totals = values.new_zeros(len(spans)).index_add(0, place, torch.where(inside, values, values.new_zeros(())))
    counts = torch.bincount(place, minlength=len(spans))
    return torch.where(inside, totals[place] / counts[place], values.new_zeros(()))


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
