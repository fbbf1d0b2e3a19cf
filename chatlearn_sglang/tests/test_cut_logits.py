from __future__ import annotations

import pytest
import torch

from chatlearn_core.types import LogprobBasis
from chatlearn_sglang.engine_side.cut_logits import cut_logits
from chatlearn_testing.fakes.sampling import basis_logprobs

CUTS = [(1.0, 0, 0.9), (0.7, 11, 0.85), (2.0, 5, 1.0), (1.0, 0, 1.0), (0.3, 1, 0.01), (1.0, 500, 0.5)]


def test_the_masked_logits_have_the_distribution_of_the_basis() -> None:
    logits = torch.randn(len(CUTS), 97, generator=torch.Generator().manual_seed(0)) * 3
    params = [{"temperature": t, "top_k": k, "top_p": p} for t, k, p in CUTS]
    found = cut_logits(logits.clone(), params)
    for row, (temperature, top_k, top_p) in enumerate(CUTS):
        expected = basis_logprobs(logits[row], LogprobBasis(temperature, top_p, top_k))
        torch.testing.assert_close(torch.log_softmax(found[row].double() / temperature, -1), expected)


@pytest.mark.parametrize("top_p", [1.0, 0.999999])
def test_tokens_tied_with_the_last_kept_token_are_kept(top_p: float) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    found = cut_logits(logits, [{"temperature": 1.0, "top_k": 2, "top_p": top_p}])
    assert torch.isfinite(found)[0].tolist() == [False, True, True, True, False]


def test_a_flat_distribution_keeps_every_token_without_top_p() -> None:
    logits = torch.zeros(1, 50_000)  # where the sum of probabilities reaches 1 before the last token
    assert bool(torch.isfinite(cut_logits(logits, [{"temperature": 1.0, "top_k": 0, "top_p": 1.0}])).all())
