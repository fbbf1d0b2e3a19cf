from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from chatlearn_algorithms.kto import KTO, POINT, KTOLoss
from chatlearn_algorithms.mismatched import mismatched
from chatlearn_algorithms.preference_options import KTOOptions
from chatlearn_core.exceptions import DataError
from chatlearn_core.types import Prompt, Sample

LABELS = [1.0, 0.0, 0.0, 1.0]


@pytest.fixture
def batch(make_preferences):
    """Four completions, two of them good, and a reference point."""
    made = make_preferences([(1.0, 3), (0.0, 2)], [(0.0, 4), (1.0, 1)])
    made.sequence_data["label"] = torch.tensor(LABELS)
    made.sequence_data[POINT] = torch.full((4,), 0.7, dtype=torch.float64)
    return made


LOSS = KTOLoss(beta=0.4, desirable=1.2, undesirable=0.8)


def test_value_by_a_loop_over_the_paper(batch):
    bounds = batch.cu_seqlens.tolist()
    expected = 0.0
    for index, label in enumerate(LABELS):
        ratio = 0.0
        for t in range(bounds[index], bounds[index + 1]):
            if batch.loss_mask[t]:
                ratio += float(batch.token_data["logprobs"][t] - batch.token_data["reference_logprobs"][t])
        x = 0.4 * (ratio - 0.7) * (1 if label else -1)
        expected += (1.2 if label else 0.8) * (1 - 1 / (1 + math.exp(-x))) / 4
    found = LOSS({"logprobs": batch.token_data["logprobs"]}, LOSS.prepare(batch))
    assert found.total.item() == pytest.approx(expected, rel=1e-6)


def test_gradient_by_finite_differences_and_none_through_the_reference_point(batch):
    prepared = LOSS.prepare(batch)
    logprobs = batch.token_data["logprobs"].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: LOSS({"logprobs": x}, prepared).total, (logprobs,))


def test_micro_batches_and_order_do_not_matter(batch):
    prepared = LOSS.prepare(batch)
    whole = LOSS({"logprobs": prepared.token_data["logprobs"]}, prepared)
    parts = [prepared.select(indices) for indices in ([3, 1], [], [0], [2])]
    split = [LOSS({"logprobs": part.token_data["logprobs"]}, part) for part in parts]
    assert sum(part.total.item() for part in split) == pytest.approx(whole.total.item())
    assert sum(part.metrics["accuracy"].total for part in split) == whole.metrics["accuracy"].total
    assert pickle.loads(pickle.dumps(LOSS)) == LOSS


@pytest.mark.parametrize(("difference", "point"), [([2.0, 1.0, 0.0, 3.0], 1.5), ([-1.0, -2.0, 0.0, 1.0], 0.0)])
def test_the_reference_point_is_the_mean_over_the_step_and_not_negative(batch, make_context, difference, point):
    algorithm = KTO(KTOOptions(), make_context(reference="trainer"))
    assert algorithm.advantage_split == "batch"
    batch.sequence_data["trainer_mismatched_logprobs"] = torch.tensor(difference) - 5
    batch.sequence_data["reference_mismatched_logprobs"] = torch.full((4,), -5.0)
    derived = algorithm.advantages(batch, 1)
    assert derived.sequence_data[POINT].tolist() == [point] * 4
    assert derived.metrics["kto/desirable"].value == 0.5
    zero = KTO(KTOOptions(reference_point="zero"), make_context(reference="trainer"))
    assert zero.advantages(batch, 1).sequence_data[POINT].tolist() == [0.0] * 4


def completion(example: str, prompt: list[int], answer: list[int]) -> Sample:
    ids = np.array(prompt)
    mask = np.array([False] * len(prompt) + [token != 9 for token in answer])
    return Sample(f"{example}@0#{answer[0]}", f"{example}@0", Prompt(example, ids, ""), np.array(prompt + answer), mask)


def test_mismatched_pairs_take_the_next_examples_completion():
    samples = [completion("a", [1], [5, 6]), completion("a", [1], [7]), completion("b", [2, 3], [8, 9, 4])]
    found = mismatched(samples, 5)
    assert [sample.token_ids.tolist() for sample in found] == [[1, 8, 9, 4], [1, 8, 9, 4], [2, 3, 5, 6]]
    assert found[0].loss_mask.tolist() == [False, True, False, True]
    assert [sample.id for sample in found] == [sample.id for sample in samples]
    assert mismatched(samples, 3)[0].token_ids.tolist() == [1, 8, 9]


def test_a_step_of_one_example_has_no_mismatched_pair():
    with pytest.raises(DataError, match=r"all of example 'a'.*train\.prompts_per_step to at least 2"):
        mismatched([completion("a", [1], [5]), completion("a", [1], [6])], 9)
