"""Vectorised sampling of one token per sequence, with random numbers that do not depend on the batch.

Every draw takes one uniform number that depends only on (request seed, token index), and inverts the cumulative
processed distribution in vocabulary order. The same request therefore gives the same tokens in any batch, up to
floating-point noise in its logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UNIFORM_BITS = 48
"""Few enough that ``u * total`` is below ``total`` in float64 for every u, so that a draw never exceeds the
vocabulary."""
_CHUNK_ELEMENTS = 1 << 24
"""Number of logits processed at once: bounds the float64 cumulative distribution to 128 MiB."""


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words with full avalanche."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def seed_word(seed: int) -> int:
    """Return a request's seed as an unsigned 64-bit word; any integer is allowed."""
    return seed & _MASK


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position) pair.

    Args:
        seeds: [N]
        positions: [N] index of the token within its completion.
    """
    words = _mix(_mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (words >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) * np.float64(2.0**-_UNIFORM_BITS)


@dataclass(slots=True, frozen=True, eq=False)
class SamplingPlan:
    """Sampling parameters of N sequences, on the device; rebuilt only when the batch's composition changes.

    Fields that no sequence needs are None, so that the usual case (temperature 1, no cut) has no extra cost.
    """

    all_greedy: bool
    greedy: Tensor | None
    """[N] bool"""
    temperature: Tensor | None
    """[N, 1] float32; 1 for greedy sequences"""
    cut_rows: Tensor | None
    """[M] int64: indices of the sequences with a top-k or top-p"""
    top_k: Tensor | None
    """[M] int64: number of tokens kept; the vocabulary's size if off"""
    top_p: Tensor | None
    """[M, 1] float32"""
    max_top_k: int = 0
    """Largest ``top_k`` if all M sequences have one, else 0. A partial sort is then enough."""
    max_kept_ids: int = 0
    """Largest ``SamplingParams.max_kept_ids`` of the sequences; 0 if none asks for the ids it was sampled from."""

    @classmethod
    def build(
        cls,
        temperature: npt.NDArray[np.float32],
        top_p: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int64],
        vocab_size: int,
        device: torch.device,
        max_kept_ids: int = 0,
    ) -> SamplingPlan:
        """Build a plan from arrays [N], with values as in ``SamplingParams`` (temperature 0 is greedy,
        top_k 0 is off).
        """
        greedy = temperature == 0.0
        cut = np.flatnonzero(~greedy & ((top_p < 1.0) | ((top_k > 0) & (top_k < vocab_size))))
        ranks = np.where((top_k[cut] > 0) & (top_k[cut] < vocab_size), top_k[cut], vocab_size)
        tempered = np.where(greedy, np.float32(1.0), temperature)
        largest = int(ranks.max(initial=0))
        return cls(
            all_greedy=bool(greedy.all()),
            greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
            temperature=torch.from_numpy(tempered[:, None]).to(device) if (tempered != 1.0).any() else None,
            cut_rows=torch.from_numpy(cut).to(device) if cut.size else None,
            top_k=torch.from_numpy(ranks).to(device) if cut.size else None,
            top_p=torch.from_numpy(top_p[cut][:, None]).to(device) if cut.size else None,
            max_top_k=largest if largest < vocab_size else 0,
            max_kept_ids=max_kept_ids,
        )

    def rows(self, start: int, stop: int) -> SamplingPlan:
        """Return the plan of sequences [start, stop)."""
        part = slice(start, stop)
        inside = None if self.cut_rows is None else (self.cut_rows >= start) & (self.cut_rows < stop)
        return SamplingPlan(
            all_greedy=self.all_greedy,
            greedy=None if self.greedy is None else self.greedy[part],
            temperature=None if self.temperature is None else self.temperature[part],
            cut_rows=None if self.cut_rows is None else self.cut_rows[inside] - start,
            top_k=None if self.top_k is None else self.top_k[inside],
            top_p=None if self.top_p is None else self.top_p[inside],
            max_top_k=self.max_top_k,
            max_kept_ids=self.max_kept_ids,
        )


@dataclass(slots=True, frozen=True, eq=False)
class Sampled:
    """One token for each of N sequences."""

    token_ids: Tensor
    """[N] int64"""
    logprobs: Tensor
    """[N] float32, of the sampling distribution (raw for greedy sequences)"""
    raw_logprobs: Tensor
    """[N] float32, of the model's logits at temperature 1; not finite if the logits are not"""
    kept_ids: Tensor | None = None
    """[N, K] int64, the ids that the token was drawn from, the most likely first, -1 for unused entries; K is at most
    ``max_kept_ids`` + 1, and a row without -1 at that width may be incomplete. None if no sequence asks for them."""


def sample(logits: Tensor, plan: SamplingPlan, numbers: Tensor) -> Sampled:
    """Draw one token per row.

    Args:
        logits: [N, V], any floating type; processed in float32.
        plan: plan of the same N sequences.
        numbers: [N] float64 uniform numbers.
    """
    num_rows, vocab_size = logits.shape
    chunk = max(1, _CHUNK_ELEMENTS // vocab_size)
    if num_rows <= chunk:
        return _sample(logits, plan, numbers)
    parts = [
        _sample(logits[i : i + chunk], plan.rows(i, min(i + chunk, num_rows)), numbers[i : i + chunk])
        for i in range(0, num_rows, chunk)
    ]
    return Sampled(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.raw_logprobs for part in parts]),
        torch.cat([part.kept_ids for part in parts if part.kept_ids is not None]) if plan.max_kept_ids else None,
    )


def _sample(logits: Tensor, plan: SamplingPlan, numbers: Tensor) -> Sampled:
    raw = logits.float()
    raw_normaliser = raw.logsumexp(-1, keepdim=True)
    if plan.all_greedy:
        token = raw.argmax(-1, keepdim=True)
        logprob = (raw.gather(-1, token) - raw_normaliser).squeeze(-1)
        return Sampled(token.squeeze(-1), logprob, logprob, token if plan.max_kept_ids else None)

    scaled, normaliser = raw, raw_normaliser
    if plan.temperature is not None:
        scaled = raw / plan.temperature
        normaliser = scaled.logsumexp(-1, keepdim=True)
    if plan.cut_rows is not None and plan.top_k is not None and plan.top_p is not None and plan.cut_rows.numel():
        cut = keep_top(scaled[plan.cut_rows], plan.top_k, plan.top_p, plan.max_top_k)
        scaled = scaled.index_copy(0, plan.cut_rows, cut)
        normaliser = scaled.logsumexp(-1, keepdim=True)

    distribution = (scaled - normaliser).exp_().cumsum(-1, dtype=torch.float64)
    # The first token whose cumulative probability exceeds the target: its own probability is above zero.
    token = torch.searchsorted(distribution, numbers[:, None] * distribution[:, -1:], right=True)
    token.clamp_(max=raw.shape[-1] - 1)  # only non-finite logits exceed it; their logprob is then not finite either
    if plan.greedy is not None:
        token = torch.where(plan.greedy[:, None], raw.argmax(-1, keepdim=True), token)
    raw_logprob = (raw.gather(-1, token) - raw_normaliser).squeeze(-1)
    logprob = raw_logprob if scaled is raw else (scaled.gather(-1, token) - normaliser).squeeze(-1)
    if plan.greedy is not None:
        logprob = torch.where(plan.greedy, raw_logprob, logprob)
    return Sampled(token.squeeze(-1), logprob, raw_logprob, _kept_ids(scaled, token, plan))


def _kept_ids(scaled: Tensor, token: Tensor, plan: SamplingPlan) -> Tensor | None:
    """[N, K] see ``Sampled.kept_ids``; ``scaled`` [N, V] is minus infinity where a token was removed."""
    if not plan.max_kept_ids:
        return None
    ranked = scaled.topk(min(plan.max_kept_ids + 1, scaled.shape[-1]), dim=-1)
    kept = ranked.indices.masked_fill(ranked.values == -torch.inf, -1)
    if plan.greedy is not None:
        alone = torch.cat([token, torch.full_like(kept[:, 1:], -1)], dim=-1)
        kept = torch.where(plan.greedy[:, None], alone, kept)
    return kept


def keep_top(scaled: Tensor, top_k: Tensor, top_p: Tensor, max_top_k: int = 0) -> Tensor:
    """Set logits outside top-k, then outside top-p of the rest, to minus infinity.

    Both cuts are thresholds on the logit, so tokens tied with the last kept token are kept too, and the result does not
    depend on how a sort orders equal values. At least the most likely token is kept.

    Args:
        scaled: [M, V] logits after temperature.
        top_k: [M] number of tokens to keep.
        top_p: [M, 1] keep the smallest set of most likely tokens whose probability reaches this value.
        max_top_k: largest of ``top_k`` if all are below V, else 0.
    """
    if max_top_k:
        ranked = scaled.topk(max_top_k, dim=-1).values
    else:
        ranked = scaled.sort(dim=-1, descending=True).values
    lowest = ranked.gather(-1, top_k[:, None] - 1)
    kept = scaled.masked_fill(scaled < lowest, -torch.inf)
    if bool((top_p < 1.0).any()):
        probabilities = (ranked.masked_fill(ranked < lowest, -torch.inf) - kept.logsumexp(-1, keepdim=True)).exp()
        before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
        inside = (before < top_p) & (probabilities > 0)
        inside[:, 0] = True
        last = inside.sum(-1, keepdim=True) - 1
        kept = kept.masked_fill(kept < ranked.gather(-1, last), -torch.inf)
    return kept
