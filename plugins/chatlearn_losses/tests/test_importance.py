from __future__ import annotations

import math

import pytest
import torch

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.types import LogprobBasis
from chatlearn_losses.importance import check_same_basis, importance_weights

MASKS = [[0, 1, 1], [0, 0, 1, 1]]
# Log ratios of the masked tokens: sequence 0 has 1.0 and -0.2, sequence 1 has -1.5 and 0.3.
OLD = torch.tensor([5.0, -1.0, -1.2, 5.0, 5.0, -2.0, -0.7])
GENERATOR = torch.tensor([-5.0, -2.0, -1.0, -5.0, -5.0, -0.5, -1.0])
E = math.exp


@pytest.mark.parametrize(
    ("mode", "level", "expected", "limited"),
    [
        ("truncate", "token", [2.0, E(-0.2), E(-1.5), E(0.3)], [1, 0, 0, 0]),
        ("mask", "token", [0.0, E(-0.2), 0.0, E(0.3)], [1, 0, 1, 0]),
        # Sums of 0.8 and -1.2: products of 2.2 and 0.3.
        ("truncate", "sequence", [2.0, 2.0, E(-1.2), E(-1.2)], [1, 1, 0, 0]),
        ("mask", "sequence", [0.0, 0.0, 0.0, 0.0], [1, 1, 1, 1]),
        # Means of 0.4 and -0.6: geometric means of 1.49 and 0.55, both inside [1/2, 2].
        ("truncate", "sequence_geometric", [E(0.4), E(0.4), E(-0.6), E(-0.6)], [0, 0, 0, 0]),
        ("mask", "sequence_geometric", [E(0.4), E(0.4), E(-0.6), E(-0.6)], [0, 0, 0, 0]),
    ],
)
def test_weights_by_hand(make_batch, mode, level, expected, limited):
    batch = make_batch(MASKS)
    result = importance_weights(OLD, GENERATOR, batch, mode=mode, level=level, threshold=2.0)
    assert result.weights[batch.loss_mask].tolist() == pytest.approx(expected)
    assert result.limited[batch.loss_mask].int().tolist() == limited
    assert not result.weights[~batch.loss_mask].any()
    assert not result.limited[~batch.loss_mask].any()


def test_detached(make_batch):
    old = OLD.clone().requires_grad_()
    result = importance_weights(old, GENERATOR, make_batch(MASKS), mode="truncate", level="token", threshold=2.0)
    assert not result.weights.requires_grad


@pytest.mark.parametrize(
    ("mode", "level", "threshold", "minimum", "expected", "limited"),
    [
        # Ratios of 2.72, 0.82, 0.22 and 1.35.
        ("truncate", "token", 2.0, 0.5, [2.0, E(-0.2), 0.5, E(0.3)], [1, 0, 1, 0]),
        ("truncate", "token", 0.8, None, [0.8, 0.8, E(-1.5), 0.8], [1, 1, 0, 1]),
        ("mask", "token", 3.0, 0.9, [E(1.0), 0.0, 0.0, E(0.3)], [0, 1, 1, 0]),
        # Geometric means of 1.49 and 0.55 decide, and the tokens' own ratios are the weights.
        ("mask_sequences", "sequence_geometric", 1.5, None, [E(1.0), E(-0.2), 0.0, 0.0], [0, 0, 1, 1]),
        # Products of 2.2 and 0.3.
        ("mask_sequences", "sequence", 2.0, 0.2, [0.0, 0.0, E(-1.5), E(0.3)], [1, 1, 0, 0]),
    ],
)
def test_bounds_by_hand(make_batch, mode, level, threshold, minimum, expected, limited):
    batch = make_batch(MASKS)
    result = importance_weights(OLD, GENERATOR, batch, mode=mode, level=level, threshold=threshold, minimum=minimum)
    assert result.weights[batch.loss_mask].tolist() == pytest.approx(expected)
    assert result.limited[batch.loss_mask].int().tolist() == limited
    assert not result.weights[~batch.loss_mask].any()


@pytest.mark.parametrize(
    ("mode", "level", "bounds", "problem"),
    [
        ("mask", "token", (None, 0.5), r"between 2\.0 and 0\.5: nothing is"),
        ("truncate", "token", (1.5, 1.2), r"between 1\.5 and 1\.2: nothing is"),
        ("mask_sequences", "token", (None, 2.0), "level is sequence or sequence_geometric"),
    ],
)
def test_bounds_without_anything_between_are_refused(make_batch, mode, level, bounds, problem):
    minimum, threshold = bounds
    with pytest.raises(ValueError, match=problem):
        importance_weights(
            OLD, GENERATOR, make_batch(MASKS), mode=mode, level=level, threshold=threshold, minimum=minimum
        )


def test_same_basis_passes():
    basis = LogprobBasis(0.7)
    check_same_basis(basis, LogprobBasis(0.7), first_name="a", second_name="b", wanted_by="c")


def test_different_bases_are_refused():
    with pytest.raises(ConfigError) as error:
        check_same_basis(
            LogprobBasis(0.7),
            LogprobBasis(0.7, top_p=0.9),
            first_name="trainer_logprobs",
            second_name="generator_logprobs",
            wanted_by="importance_correction=mask",
        )
    message = str(error.value)
    assert "importance_correction=mask compares trainer_logprobs with generator_logprobs" in message
    assert "top_p (1.0 against 0.9)" in message
    assert "temperature (" not in message
    assert "sampling.top_p: 1.0" in message
