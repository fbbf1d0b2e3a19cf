"""Logprobs of tokens when the rows of the head are spread over tensor parallel ranks.

Each rank computes the logits of its part of the vocabulary. Sums over the vocabulary are reduced over the ranks, so no
rank ever holds a [T, V] tensor; a reduction's gradient passes unchanged, because every rank computes the same loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from chatlearn_hf.token_outputs import RequestedLogprobs
from chatlearn_losses import TokenLogprobs


def sharded_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    requested: RequestedLogprobs,
    *,
    group: dist.ProcessGroup,
    first_id: int,
    chunk_tokens: int,
) -> TokenLogprobs:
    """Return what ``token_logprobs_from_hidden`` returns for the whole head; the same on every rank.

    Args:
        hidden: [N, H], the same on every rank.
        weight: [v, H] this rank's rows of the head, without padding.
        labels: [N] int64
        requested: what to compute.
        group: the tensor parallel ranks, in the order of their rows.
        first_id: token id of this rank's first row.
        chunk_tokens: rows whose logits are held at once. If there are more, logits are recomputed in the backward pass.
    """

    def reduced(values: Tensor) -> Tensor:
        total: Tensor = reduce_from_tensor_model_parallel_region(values, group=group)
        return total

    def of_chunk(rows: Tensor, targets: Tensor, ids: Tensor | None, kept: Tensor | None) -> TokenLogprobs:
        logits = torch.nn.functional.linear(copy_to_tensor_model_parallel_region(rows, group=group), weight)
        scaled = logits.float() / requested.temperature
        largest = scaled.detach().amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = scaled - largest[:, None]
        powers = shifted.exp()
        total = reduced(powers.sum(-1))
        normaliser = total.log()

        def shifted_at(tokens: Tensor) -> Tensor:
            """Return the shifted logits of tokens [N, k], of which this rank may hold any."""
            local = tokens - first_id
            held = (local >= 0) & (local < weight.shape[0])
            picked = shifted.gather(-1, local.clamp(0, weight.shape[0] - 1))
            return reduced(torch.where(held, picked, 0.0))

        label = shifted_at(targets[:, None]).squeeze(-1)
        entropy = topk_ids = None
        if requested.with_entropy:
            # 0 where a logit is -inf
            terms = torch.where(powers > 0, powers * shifted, 0.0)
            entropy = normaliser - reduced(terms.sum(-1)) / total
        if requested.top_k:
            topk_ids = _most_likely(shifted.detach(), requested.top_k, first_id, group)
        truncated = None
        if kept is not None:
            among = shifted_at(kept.clamp(min=0).long()).masked_fill(kept < 0, -torch.inf)
            truncated = label - among.logsumexp(-1)
        return TokenLogprobs(
            label - normaliser,
            entropy,
            topk_ids,
            None if topk_ids is None else shifted_at(topk_ids) - normaliser[:, None],
            None if ids is None else shifted_at(ids) - normaliser[:, None],
            truncated,
        )

    chunks: list[TokenLogprobs] = []
    recompute = len(hidden) > chunk_tokens and torch.is_grad_enabled()
    # At least one chunk: even without rows the result must be part of the graph of the head's parameters.
    for start in range(0, max(len(hidden), 1), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        ids, kept = (None if every is None else every[part] for every in (requested.selected_ids, requested.kept_ids))
        rows = (hidden[part], labels[part], ids, kept)
        if recompute:
            chunks.append(checkpoint(of_chunk, *rows, use_reentrant=False, preserve_rng_state=False))
        else:
            chunks.append(of_chunk(*rows))

    def joined(values: Sequence[Tensor | None]) -> Tensor | None:
        there = [value for value in values if value is not None]
        return torch.cat(there) if there else None

    return TokenLogprobs(
        torch.cat([chunk.logprobs for chunk in chunks]), *map(joined, list(zip(*chunks, strict=True))[1:])
    )


def _most_likely(logits: Tensor, count: int, first_id: int, group: dist.ProcessGroup) -> Tensor:
    """Return the ids [N, k] of the largest logits over all ranks, the largest first."""
    own = min(count, logits.shape[-1])
    values, ids = logits.topk(own, dim=-1)
    values = torch.nn.functional.pad(values, (0, count - own), value=-torch.inf)
    ids = torch.nn.functional.pad(ids + first_id, (0, count - own))
    size = dist.get_world_size(group)
    every = [torch.empty_like(values) for _ in range(size)]
    every_id = [torch.empty_like(ids) for _ in range(size)]
    dist.all_gather(every, values.contiguous(), group=group)
    dist.all_gather(every_id, ids.contiguous(), group=group)
    best = torch.cat(every, -1).topk(count, dim=-1).indices
    return torch.cat(every_id, -1).gather(-1, best)
