"""A student that learns by policy gradient, and an appraiser of states whose values are the baseline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chatlearn_core.protocols import Algorithm, AlgorithmContext, LossOutput, RoleUpdate
from chatlearn_core.protocols.loss import Unit
from chatlearn_core.types import Derived, Metric, OutputRequest, Outputs, TrainBatch
from probe_package.options import AppraisedOptions


def with_token_mean(batch: TrainBatch) -> TrainBatch:
    """The batch with weights that make a sum over its learned tokens their mean."""
    weights = batch.loss_mask.float() / batch.loss_mask.sum().clamp(min=1)
    return replace(batch, token_data=batch.token_data | {"loss_weight": weights})


@dataclass(frozen=True)
class StudentLoss:
    """The mean over tokens of -A exp(logprob - old) + c margin."""

    margin_coef: float
    temperature: float
    unit: Unit = "sequence"

    @property
    def needs(self) -> OutputRequest:
        return OutputRequest(frozenset({"logprobs", "margin"}), self.temperature)

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        return with_token_mean(batch)

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        data, mask = batch.token_data, batch.loss_mask
        ratio = torch.where(mask, outputs["logprobs"] - data["student_logprobs"], 0.0).exp()
        losses = -data["advantages"] * ratio + self.margin_coef * outputs["margin"]
        margin = Metric(float(outputs["margin"].detach()[mask].sum()), int(mask.sum()))
        return LossOutput((data["loss_weight"] * losses).sum(), {"margin": margin})


@dataclass(frozen=True)
class AppraiserLoss:
    """The mean over tokens of (value - return)² / 2."""

    unit: Unit = "sequence"

    @property
    def needs(self) -> OutputRequest:
        return OutputRequest(frozenset({"values"}))

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        return with_token_mean(batch)

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        errors = outputs["values"] - batch.token_data["returns"]
        return LossOutput((batch.token_data["loss_weight"] * errors.square() / 2).sum())


class Appraised(Algorithm):
    """The appraiser learns first and oftener; the price of margins follows the margins of the steps before."""

    policy = "student"
    scheduled = frozenset({"margin_coef"})

    def __init__(self, options: AppraisedOptions, context: AlgorithmContext) -> None:
        self.options = options
        self.context = context
        self.group_size = options.group_size
        self.price = 1.0

    def flow(self, prompts: Any, m: Any) -> Any:
        samples = m.pen.generate(prompts)
        return m.join(
            samples,
            m.taste.score(samples),
            m.student.logprobs(samples),
            m.student.margin(samples),
            m.appraiser.values(samples),
        )

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        mask = batch.loss_mask
        rewards = batch.sequence_data["reward"].float()[batch.sequence_index]
        returns = torch.where(mask, rewards, 0.0)
        data = {
            "returns": returns,
            "advantages": returns - torch.where(mask, batch.token_data["appraiser_values"], 0.0),
        }
        margins = batch.token_data["student_margin"][mask]
        return Derived(data, metrics={"appraised/margin": Metric(float(margins.double().sum()), len(margins))})

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        options = self.context.options_at(self.options, step)
        planned = [RoleUpdate("appraiser", AppraiserLoss(), epochs=options.appraiser_epochs, mini_batches=1)]
        if step > options.warm_up_steps:
            loss = StudentLoss(self.price * options.margin_coef, self.context.basis.temperature)
            planned.append(RoleUpdate("student", loss))
        return planned

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.price *= 1.25 if metrics["appraised/margin"] > self.options.target_margin else 0.8

    def state_dict(self) -> dict[str, Any]:
        return {"price": self.price}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.price = state["price"]
