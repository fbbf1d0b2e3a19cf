"""DPO, IPO, SimPO and ORPO: against loops over the papers' formulas, and what must not matter."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from chatlearn_algorithms.dpo import DPO, DPOLoss
from chatlearn_algorithms.ipo import IPOLoss
from chatlearn_algorithms.orpo import ORPOLoss
from chatlearn_algorithms.pair_loss import NOT_COMPARED, PairLoss
from chatlearn_algorithms.preference_kinds import LabelledCompletions, RankedCompletions
from chatlearn_algorithms.preference_options import DPOOptions, SimPOOptions
from chatlearn_algorithms.simpo import SimPO, SimPOLoss
from chatlearn_core.data import RawExample
from chatlearn_core.exceptions import DataError
from chatlearn_core.types import TrainBatch

PROMPTS: tuple[list[tuple[float, int]], ...] = (
    [(1.0, 4), (0.0, 2)],
    [(0.0, 3), (1.0, 5)],
    [(3.0, 1), (1.0, 2), (2.0, 3)],
)
"""(rank, tokens) of the completions of three prompts: two pairs, and three completions that give three pairs."""


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def logit(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


Side = dict[str, list[float]]


def dpo(c: Side, r: Side) -> float:
    h = 0.3 * (
        (sum(c["logprobs"]) - sum(c["reference_logprobs"])) - (sum(r["logprobs"]) - sum(r["reference_logprobs"]))
    )
    return -0.9 * log_sigmoid(h) - 0.1 * log_sigmoid(-h) - 0.5 * sum(c["logprobs"]) / len(c["logprobs"])


def ipo(c: Side, r: Side) -> float:
    h = (sum(c["logprobs"]) - sum(c["reference_logprobs"])) - (sum(r["logprobs"]) - sum(r["reference_logprobs"]))
    return (h - 1 / (2 * 0.3)) ** 2


def ipo_means(c: Side, r: Side) -> float:
    ratio = [(sum(s["logprobs"]) - sum(s["reference_logprobs"])) / len(s["logprobs"]) for s in (c, r)]
    return (ratio[0] - ratio[1] - 1 / (2 * 0.3)) ** 2


def simpo(c: Side, r: Side) -> float:
    means = [sum(s["logprobs"]) / len(s["logprobs"]) for s in (c, r)]
    return -log_sigmoid(2.5 * (means[0] - means[1]) - 0.7)


def orpo(c: Side, r: Side) -> float:
    means = [sum(s["logprobs"]) / len(s["logprobs"]) for s in (c, r)]
    return -means[0] - 0.2 * log_sigmoid(logit(means[0]) - logit(means[1]))


CASES: list[tuple[PairLoss, Callable[[Side, Side], float]]] = [
    (DPOLoss(beta=0.3, label_smoothing=0.1, sft_coef=0.5), dpo),
    (IPOLoss(beta=0.3), ipo),
    (IPOLoss(beta=0.3, token_means=True), ipo_means),
    (SimPOLoss(beta=2.5, gamma=0.7), simpo),
    (ORPOLoss(odds_ratio_coef=0.2), orpo),
]
each_loss = pytest.mark.parametrize(("loss", "formula"), CASES, ids=[formula.__name__ for _, formula in CASES])


def sides(batch: TrainBatch) -> list[Side]:
    """The masked tokens' values of each sequence."""
    bounds = batch.cu_seqlens.tolist()
    found = []
    for start, stop in itertools.pairwise(bounds):
        mask = batch.loss_mask[start:stop]
        found.append({name: values[start:stop][mask].tolist() for name, values in batch.token_data.items()})
    return found


def by_loop(batch: TrainBatch, formula: Callable[[Side, Side], float]) -> float:
    """The mean over prompts of the mean over ordered pairs."""
    completions, ranks, group = sides(batch), batch.sequence_data["rank"].tolist(), batch.group_index.tolist()
    of_prompt: dict[int, list[float]] = {}
    for i, chosen in enumerate(completions):
        for j, rejected in enumerate(completions):
            if group[i] == group[j] and ranks[i] > ranks[j]:
                of_prompt.setdefault(group[i], []).append(formula(chosen, rejected))
    return sum(sum(values) / len(values) for values in of_prompt.values()) / len(of_prompt)


def total(loss: PairLoss, batch: TrainBatch, logprobs: torch.Tensor) -> torch.Tensor:
    return loss({"logprobs": logprobs}, loss.prepare(batch)).total


@each_loss
def test_values_by_a_loop_over_the_paper(loss, formula, make_preferences):
    batch = make_preferences(*PROMPTS)
    found = total(loss, batch, batch.token_data["logprobs"])
    # Pair weights are float32: 1/3 has 8 digits.
    assert found.item() == pytest.approx(by_loop(batch, formula), rel=1e-6)


@each_loss
def test_gradients_by_finite_differences(loss, formula, make_preferences):
    batch = make_preferences([(1.0, 3), (0.0, 2)], [(0.0, 1), (2.0, 2)])
    prepared = loss.prepare(batch)
    logprobs = batch.token_data["logprobs"].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss({"logprobs": x}, prepared).total, (logprobs,))
    (gradient,) = torch.autograd.grad(loss({"logprobs": logprobs}, prepared).total, logprobs)
    assert not gradient[~batch.loss_mask].any()
    assert gradient[batch.loss_mask].all()


@each_loss
def test_micro_batches_order_and_masked_tokens_do_not_matter(loss, formula, make_preferences):
    batch = make_preferences(*PROMPTS)
    whole = total(loss, batch, batch.token_data["logprobs"]).item()
    prepared = loss.prepare(batch)
    parts = [prepared.select(indices) for indices in ([5, 6, 4], [], [3, 2, 1, 0])]
    outputs = [loss({"logprobs": part.token_data["logprobs"]}, part) for part in parts]
    assert sum(output.total.item() for output in outputs) == pytest.approx(whole, rel=1e-9)
    joined = sum(output.metrics["margin"].total for output in outputs)
    assert joined == pytest.approx(
        loss({"logprobs": prepared.token_data["logprobs"]}, prepared).metrics["margin"].total
    )
    noisy = torch.where(batch.loss_mask, batch.token_data["logprobs"], torch.nan)
    assert total(loss, batch, noisy).item() == pytest.approx(whole, rel=1e-12)


@each_loss
def test_an_empty_micro_batch_is_zero_and_connected(loss, formula, make_preferences):
    empty = loss.prepare(make_preferences(*PROMPTS)).select([])
    logprobs = torch.zeros(0, requires_grad=True)
    output = loss({"logprobs": logprobs}, empty)
    output.total.backward()
    assert (output.total.item(), logprobs.grad.shape) == (0.0, (0,))


@each_loss
def test_losses_travel(loss, formula):
    assert pickle.loads(pickle.dumps(loss)) == loss
    assert (loss.unit, loss.needs.names) == ("pair", {"logprobs"})


def test_dpo_starts_at_log_two_with_the_papers_gradient(make_preferences):
    """At π = ref the gradient of a token of the chosen completion is −β/2, of the rejected one β/2 (section 4)."""
    batch = make_preferences([(1.0, 3), (0.0, 2)])
    logprobs = batch.token_data["reference_logprobs"].clone().requires_grad_()
    found = total(DPOLoss(beta=0.4), batch, logprobs)
    (gradient,) = torch.autograd.grad(found, logprobs)
    assert found.item() == pytest.approx(math.log(2), rel=1e-6)
    assert gradient[batch.loss_mask].tolist() == pytest.approx([-0.2] * 3 + [0.2] * 2)


def test_metrics(make_preferences):
    """A pair in order, one out of order, and a tie, which is ordered by half."""
    batch = make_preferences(*[[(1.0, 1), (0.0, 1)]] * 3)
    batch.token_data["reference_logprobs"].zero_()
    batch.token_data["logprobs"][batch.loss_mask] = torch.tensor([-1.0, -3.0, -5.0, -4.0, -2.0, -2.0]).double()
    loss = DPOLoss(beta=0.5)
    metrics = loss({"logprobs": batch.token_data["logprobs"]}, loss.prepare(batch)).metrics
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(
        {"accuracy": 0.5, "margin": 1 / 6, "chosen_score": -4 / 3, "rejected_score": -1.5}
    )


def test_best_and_worst_alone(make_preferences, make_context):
    algorithm = DPO(DPOOptions(pairing="best_worst"), make_context(reference="trainer"))
    batch = make_preferences(*PROMPTS)
    assert algorithm.advantages(batch, 1).exclusions == {"p2@0#2": NOT_COMPARED}


def test_a_completion_whose_rival_is_gone_is_excluded(make_preferences, make_context):
    algorithm = SimPO(SimPOOptions(), make_context())
    batch = make_preferences(*PROMPTS).select([0, 2, 3])
    assert algorithm.advantages(batch, 1).exclusions == {"p0@0#0": NOT_COMPARED}


def test_held_out_pairs_are_measured_as_the_loss_is(make_preferences, make_context):
    context = replace(make_context(), roles={"trainer": "trainer", "reference": "trainer"})
    algorithm = DPO(DPOOptions(beta=0.3), context)
    assert algorithm.evaluation_input == algorithm.input == "ranked_completions"
    batch = make_preferences(*PROMPTS, [(1.0, 2)])
    batch.token_data["trainer_logprobs"] = batch.token_data["logprobs"]
    measured = algorithm.evaluation_metrics(batch)
    compared = make_preferences(*PROMPTS).select(range(7))
    for name in ("logprobs", "reference_logprobs"):
        compared.token_data[name] = batch.token_data[name][: compared.num_tokens]
    expected = total(algorithm.loss(), compared, compared.token_data["logprobs"])
    assert measured["loss"].value == pytest.approx(expected.item())
    assert 0 <= measured["accuracy"].value <= 1


def test_prompts_are_sampled_where_the_roles_are_there(make_context):
    assert SimPO(SimPOOptions(), make_context()).evaluation_input is None


class Row:
    """Stands for the renderer: completions are their letters."""

    format = None

    def prompt(self, raw: RawExample, rendered: Any = None) -> Any:
        from chatlearn_core.types import Prompt

        return Prompt("row", np.array([1]), raw.prompt)

    def rendered(self, raw: RawExample, completion: str) -> Any:
        from types import SimpleNamespace

        ids = np.array([ord(letter) for letter in completion])
        mask = np.ones(len(ids), dtype=bool)
        return SimpleNamespace(prompt=self.prompt(raw), completion_ids=ids, loss_mask=mask)


def raw(**fields: Any) -> RawExample:
    return RawExample(prompt="?", **fields)


def test_a_ranked_algorithm_refuses_labels():
    with pytest.raises(DataError, match=r"needs ranks\. Take a format with 'chosen' and 'rejected'.*or algorithm kto"):
        RankedCompletions().build(raw(completions=("a",), labels=(True,)), Row())


@pytest.mark.parametrize("kind", [RankedCompletions, LabelledCompletions])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"completions": ("a", "a"), "ranks": (1.0, 0.0)}, "completions 0 and 1 are equal, but their ranks differ"),
        ({"completions": ("a",), "ranks": (1.0,)}, "a single completion needs a label, not a rank"),
        ({"completions": ("a", "b"), "ranks": (1.0, 1.0)}, "all 2 completions have rank 1"),
        ({"completions": ("a", "b"), "ranks": (1.0,)}, "2 completions with 1 ranks; each needs one"),
        ({"completions": ("a",)}, "1 completions with 0 ranks and 0 labels"),
    ],
)
def test_rows_without_a_preference_are_refused(kind, fields, message):
    with pytest.raises(DataError, match=message):
        kind().build(raw(**fields), Row())


def test_pairs_become_labels():
    example = LabelledCompletions().build(raw(completions=("a", "b"), ranks=(0.0, 1.0)), Row())
    assert (example.labels, example.ranks) == ((False, True), ())
    kept = LabelledCompletions().build(raw(completions=("a",), labels=(False,)), Row())
    assert kept.labels == (False,)
    with pytest.raises(DataError, match="3 different ranks, which do not say which completions are good; give labels"):
        LabelledCompletions().build(raw(completions=("a", "b", "c"), ranks=(0.0, 1.0, 2.0)), Row())
