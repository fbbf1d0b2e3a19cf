"""Logprobs and entropies of given tokens without a second [T, V] tensor in memory.

Rows are predictions: row t of the logits (or hidden states) is scored against ``labels[t]``. ``prediction_rows`` gives
the shift for packed sequences. The softmax runs in float32 for half-precision input (float64 stays), a chunk of rows
at a time; the backward pass recomputes each chunk's softmax from the saved log-normaliser.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

DEFAULT_CHUNK_TOKENS = 1024
"""1024 rows of a 150k vocabulary are 0.6 GB in float32."""
_CHUNK_ELEMENTS, _CHUNK_ELEMENTS_ON_GPU = 1 << 25, 1 << 27
"""Logits held at once, 128 and 512 MiB in float32. A GPU computes small chunks faster than Python starts their
kernels."""
_TEMPORARY_SHARE = 2
"""The softmax of a chunk of logits works with tensors of half as many elements at once: so a chunk costs little more
memory than its logits and their gradient. On a CPU, glibc returns tensors above 32 MiB to the system at once; smaller
ones of changing sizes would fragment its heap.
"""


def default_chunk_tokens(vocab_size: int, device: torch.device) -> int:
    """Return the number of rows whose logits are held at once, unless a user chooses another."""
    return max(1, (_CHUNK_ELEMENTS_ON_GPU if device.type == "cuda" else _CHUNK_ELEMENTS) // max(1, vocab_size))


def softmax_tokens(vocab_size: int, device: torch.device) -> int:
    """Return the number of rows of a chunk of logits whose softmax is computed at once."""
    return max(1, default_chunk_tokens(vocab_size, device) // _TEMPORARY_SHARE)


class TokenLogprobs(NamedTuple):
    """Per-row results."""

    logprobs: Tensor
    """[T] float32 (float64 for float64 logits)."""
    entropy: Tensor | None
    """[T] nats, of the same distribution; None if not asked for."""
    topk_ids: Tensor | None = None
    """[T, k] int64, the most likely tokens, the most likely first; None if not asked for."""
    topk_logprobs: Tensor | None = None
    """[T, k] of ``topk_ids``, with gradient."""
    selected: Tensor | None = None
    """[T, k] logprobs of ``selected_ids``, with gradient; None without them."""
    truncated: Tensor | None = None
    """[T] of the label among the kept ids of its row, with gradient; None if none were given."""


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    with_entropy: bool = False,
) -> TokenLogprobs:
    """log softmax(logits / temperature)[label] of every row, with gradient for the logits.

    Args:
        logits: [T, V]
        labels: [T] int64, each in [0, V).
        temperature: above 0.
        chunk_tokens: rows whose softmax is in memory at once.
        with_entropy: also the entropy of every row's distribution, with gradient.
    """
    assert temperature > 0.0, f"temperature is {temperature}; greedy logprobs are of the raw distribution: pass 1"
    return _scored(logits, labels, temperature, chunk_tokens, with_entropy, [])


def _scored(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
    known: list[_RowValues],
) -> TokenLogprobs:
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]  # torch does not annotate it
        logits, labels, temperature, chunk_tokens, with_entropy, known
    )
    return TokenLogprobs(logprobs, entropy if with_entropy else None)


def token_logprobs_from_hidden(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor] | Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    with_entropy: bool = False,
    recompute: bool = True,
    top_k: int = 0,
    selected_ids: Tensor | None = None,
    kept_ids: Tensor | None = None,
) -> TokenLogprobs:
    """The same from the last hidden states: the head runs a chunk at a time, so [T, V] logits never exist.

    Args:
        hidden: [T, H]
        head: maps [C, H] to [C, V] logits (a module, adapters included), or a weight [V, H].
        labels: [T] int64
        temperature: above 0.
        chunk_tokens: rows whose logits are in memory at once.
        with_entropy: also the entropy of every row's distribution, with gradient.
        recompute: run the head again in the backward pass instead of keeping every chunk's logits. False is faster by
            one head forward where all the logits fit into memory.
        top_k: number of most likely tokens to return for every row.
        selected_ids: [T, k] int64; also the logprobs of these tokens.
        kept_ids: [T, K] integers, -1 for unused entries; also ``truncated_logprobs`` over them.
    """
    assert temperature > 0.0, f"temperature is {temperature}; greedy logprobs are of the raw distribution: pass 1"
    project = partial(_linear, head) if isinstance(head, Tensor) else head

    def of_chunk(
        rows: Tensor, row_labels: Tensor, row_ids: Tensor | None, row_kept: Tensor | None, known: list[_RowValues]
    ) -> TokenLogprobs:
        logits = project(rows)
        part_tokens = min(chunk_tokens, softmax_tokens(logits.shape[-1], logits.device))
        scored = _scored(logits, row_labels, temperature, part_tokens, with_entropy, known)
        topk_ids = logits.detach().topk(top_k, dim=-1).indices if top_k else None
        return scored._replace(
            topk_ids=topk_ids,
            topk_logprobs=None if topk_ids is None else logprobs_at(logits, topk_ids, temperature),
            selected=None if row_ids is None else logprobs_at(logits, row_ids, temperature),
            truncated=None if row_kept is None else truncated_logprobs(logits, row_labels, row_kept, temperature),
        )

    chunks: list[TokenLogprobs] = []
    # At least one chunk: even without rows the result must be part of the graph of the head's parameters.
    for start in range(0, max(len(hidden), 1), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        known: list[_RowValues] = []
        row_ids, row_kept = (None if ids is None else ids[part] for ids in (selected_ids, kept_ids))
        rows = (hidden[part], labels[part], row_ids, row_kept, known)
        if recompute and torch.is_grad_enabled():
            # The head has no dropout, so there is no random state to keep.
            chunks.append(checkpoint(of_chunk, *rows, use_reentrant=False, preserve_rng_state=False))
        else:
            chunks.append(of_chunk(*rows))

    def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
        there = [part for part in parts if part is not None]
        return torch.cat(there) if there else None

    return TokenLogprobs(
        torch.cat([chunk.logprobs for chunk in chunks]),
        joined([chunk.entropy for chunk in chunks]),
        joined([chunk.topk_ids for chunk in chunks]),
        joined([chunk.topk_logprobs for chunk in chunks]),
        joined([chunk.selected for chunk in chunks]),
        joined([chunk.truncated for chunk in chunks]),
    )


def logprobs_at(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """[T, k] log softmax(logits / temperature) of the tokens ``ids`` [T, k] of every row, with gradient; in float32 for
    half-precision logits [T, V].
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return scaled.gather(-1, ids) - scaled.logsumexp(-1, keepdim=True)


def truncated_logprobs(logits: Tensor, labels: Tensor, kept_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """[T] z_y − log Σ_{i kept} exp(z_i) with z = logits / temperature: the logprob of each label in the distribution
    that was truncated to the kept ids and renormalised, with gradient for the logits.

    Tokens sampled with top-k or top-p come from this distribution, so two policies' logprobs over the same ids form an
    importance ratio. The ids are those that the sampling policy kept; a policy that has changed since would keep
    others, which the ratio ignores.

    Args:
        logits: [T, V]
        labels: [T] int64, each among the kept ids of its row.
        kept_ids: [T, K] integers, -1 for unused entries.
        temperature: above 0.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scaled = logits.gather(-1, kept_ids.clamp(min=0).long()).to(dtype) / temperature
    normaliser = scaled.masked_fill(kept_ids < 0, -torch.inf).logsumexp(-1)
    return logits.gather(-1, labels[:, None]).squeeze(-1).to(dtype) / temperature - normaliser


def prediction_rows(cu_seqlens: Tensor, token_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return which row predicts which token in packed sequences.

    Args:
        cu_seqlens: [S + 1], 0 first.
        token_mask: [T] bool; only the predictions of these tokens. A mask on the tokens that are learned spares the
            head every prompt token.

    Returns:
        rows and targets, [N] int64 each, on the mask's device: logits[rows] predict token_ids[targets], where targets =
        rows + 1. A sequence's first token has no prediction. Results belong at ``targets``, so that entry t is of token
        t: ``torch.zeros(T).index_copy(0, targets, logprobs)``.
    """
    num_tokens = int(cu_seqlens[-1])
    device = cu_seqlens.device if token_mask is None else token_mask.device
    predicted = torch.ones(num_tokens, dtype=torch.bool, device=device)
    if token_mask is not None:
        predicted &= token_mask
    # An empty sequence at the end starts at T, which is no token.
    starts = cu_seqlens[:-1].to(device=device, dtype=torch.int64)
    predicted[starts[starts < num_tokens]] = False
    targets = predicted.nonzero().squeeze(-1)
    return targets - 1, targets


class _RowValues(NamedTuple):
    """Results of the softmax of every row, [T] each; the entropy is empty if not requested."""

    logprobs: Tensor
    normaliser: Tensor
    entropy: Tensor


class _ChunkedLogprobs(torch.autograd.Function):
    """Logprob and entropy with hand-written gradients.

    With z = logits / temperature, p = softmax(z), y the label and H the entropy: d logprob / dz_i = 1[i = y] − p_i, and
    dH / dz_i = −p_i (log p_i + H).

    ``known`` is empty at the first call and then holds its values, so that a second call with the same logits, in the
    backward pass of a checkpoint, has no softmax to compute.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        known: list[_RowValues],
    ) -> tuple[Tensor, Tensor]:
        if not known:
            known.append(_row_values(logits, labels, temperature, chunk_tokens, with_entropy))
        logprobs, normaliser, entropy = known[0]
        ctx.save_for_backward(logits, labels, normaliser, entropy)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        # Clones: a result leads to its graph, and the graph of a checkpoint to ``known``.
        return logprobs.clone(), entropy.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None, None, None]:
        logits, labels, normaliser, entropy = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for start in range(0, logits.shape[0], ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            probabilities = _probabilities(logits[rows], normaliser[rows], ctx.temperature)
            if grad_entropy is not None and entropy.numel():
                grad = _entropy_terms(probabilities).sub_(probabilities * entropy[rows, None])
                grad.mul_(grad_entropy[rows, None])
                if grad_logprobs is not None:
                    grad.sub_(probabilities.mul_(grad_logprobs[rows, None]))
            elif grad_logprobs is not None:
                grad = probabilities.mul_(-grad_logprobs[rows, None])
            else:
                grad = probabilities.zero_()
            if grad_logprobs is not None:
                grad.scatter_add_(-1, labels[rows, None], grad_logprobs[rows, None])
            grad_logits[rows] = grad if ctx.temperature == 1.0 else grad.div_(ctx.temperature)
        return grad_logits, None, None, None, None, None


def _row_values(
    logits: Tensor, labels: Tensor, temperature: float, chunk_tokens: int, with_entropy: bool
) -> _RowValues:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logprobs = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
    normaliser = torch.empty_like(logprobs)
    entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
    for start in range(0, logits.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        scaled = _scaled(logits[rows], dtype, temperature)
        normaliser[rows] = scaled.logsumexp(-1)
        logprobs[rows] = scaled.gather(-1, labels[rows, None]).squeeze(-1) - normaliser[rows]
        if with_entropy:
            entropy[rows] = _entropy_terms(_exponentials(scaled, normaliser[rows], logits)).sum(-1)
    return _RowValues(logprobs, normaliser, entropy)


def _probabilities(logits: Tensor, normaliser: Tensor, temperature: float) -> Tensor:
    """[C, V] softmax of logits / temperature, a new tensor."""
    return _exponentials(_scaled(logits, normaliser.dtype, temperature), normaliser, logits)


def _exponentials(scaled: Tensor, normaliser: Tensor, logits: Tensor) -> Tensor:
    """[C, V] exp(scaled - normaliser); in the memory of ``scaled``, unless that is the logits'."""
    shared = scaled.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    shifted = scaled - normaliser[:, None] if shared else scaled.sub_(normaliser[:, None])
    return shifted.exp_()


def _scaled(logits: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """[C, V] logits / temperature; the logits themselves if nothing changes."""
    return logits.to(dtype) if temperature == 1.0 else logits.to(dtype) / temperature


def _entropy_terms(probabilities: Tensor) -> Tensor:
    """−p log p, 0 where p = 0 (logits of −inf)."""
    terms: Tensor = torch.special.entr(probabilities)
    return terms


def _linear(weight: Tensor, rows: Tensor) -> Tensor:
    return torch.nn.functional.linear(rows, weight)
