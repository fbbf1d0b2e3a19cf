"""Logprobs over the ids that a token was sampled from."""

from __future__ import annotations

import pytest
import torch

from chatlearn_losses import token_logprobs_from_hidden, truncated_logprobs

ROWS, VOCABULARY, WIDTH = 9, 23, 6


def kept_rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, K] between 1 and K distinct ids a row, -1 after them, and [T] labels among them."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(VOCABULARY, generator=draw)[:WIDTH] for _ in range(ROWS)])
    counts = torch.randint(1, WIDTH + 1, (ROWS,), generator=draw)
    labels = ids.gather(-1, torch.remainder(torch.arange(ROWS), counts)[:, None]).squeeze(-1)
    return ids.masked_fill(torch.arange(WIDTH) >= counts[:, None], -1).int(), labels


def by_masking(logits: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor, temperature: float) -> torch.Tensor:
    """Row by row: softmax over the whole vocabulary after everything else was set to minus infinity."""
    rows = []
    for row, label, ids in zip(logits, labels, kept, strict=True):
        mask = torch.full_like(row, -torch.inf)
        mask[ids[ids >= 0].long()] = 0.0
        rows.append((row / temperature + mask).log_softmax(-1)[label])
    return torch.stack(rows)


def test_value_and_gradient_in_float64() -> None:
    """Against masking the whole vocabulary, and against finite differences."""
    kept, labels = kept_rows()
    logits = torch.randn(ROWS, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits.requires_grad_()
    found = truncated_logprobs(logits, labels, kept, 0.7)
    torch.testing.assert_close(found, by_masking(logits, labels, kept, 0.7), atol=1e-12, rtol=0)
    assert torch.autograd.gradcheck(lambda x: truncated_logprobs(x, labels, kept, 0.7), (logits,))
    alone = kept[:, 1] < 0
    assert (found[alone] == 0).all()
    assert alone.any(), "a row with one kept id is part of the case"


@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_chunks_of_the_head_change_nothing(chunk_tokens: int) -> None:
    kept, labels = kept_rows()
    draw = torch.Generator().manual_seed(2)
    hidden, head = torch.randn(ROWS, 5, generator=draw), torch.randn(VOCABULARY, 5, generator=draw)
    ours, plain = (tuple(x.clone().requires_grad_() for x in (hidden, head)) for _ in range(2))
    scored = token_logprobs_from_hidden(
        *ours, labels, temperature=0.7, chunk_tokens=chunk_tokens, with_entropy=True, kept_ids=kept
    )
    assert scored.truncated is not None
    expected = by_masking(plain[0] @ plain[1].T, labels, kept, 0.7)
    torch.testing.assert_close(scored.truncated, expected, atol=1e-5, rtol=0)
    upstream = torch.randn(ROWS, generator=draw)
    (upstream * scored.truncated).sum().backward()
    (upstream * expected).sum().backward()
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=0)
