"""Ulysses sequence parallelism [2309.14509]: ranks split a packed row by tokens, and exchange tokens for heads in
attention.

Each rank of a group holds 1/n of the row's tokens through the whole model. Before attention one all-to-all exchanges
tokens for heads, so that a rank sees the whole row for 1/n of the heads; another one reverses it afterwards. Both are
their own transposes, so gradients take the same way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.token_group import TokenGroup, padded


class UlyssesGroup(TokenGroup):
    """Ranks that exchange tokens for heads in attention."""

    __slots__ = ()

    def tokens_to_heads(
        self, query: Tensor, key: Tensor, value: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange tokens for heads before attention, in one all-to-all.

        If the number of key-value heads is smaller than n, or not divisible by it, each rank gets copies of the heads
        that its query heads attend to; their gradients are summed.

        Args:
            query: [ceil(T / n), Hq, D]
            key: [ceil(T / n), Hkv, D]
            value: like ``key``.
            num_tokens: T

        Returns:
            [T, Hq / n, D], and twice [T, heads, D], where ``heads`` divides Hq / n.

        Raises:
            ModelError: n does not divide Hq, or key and value heads differ in size.
        """
        share, num_heads, size = query.shape
        check_heads(num_heads, self.size)
        if value.shape[-1] != size:
            raise ModelError(
                f"Ulysses exchanges query, key and value together, but query heads have {size} and value heads"
                f" {value.shape[-1]} dimensions; set ulysses to 1 for this model."
            )
        index = key_heads_of_ranks(num_heads, key.shape[1], self.size)
        if index != list(range(key.shape[1])):
            wanted = torch.as_tensor(index, device=key.device)
            key, value = key.index_select(1, wanted), value.index_select(1, wanted)
        own, kept = num_heads // self.size, len(index) // self.size
        blocks = torch.cat([rows.view(share, self.size, -1, size) for rows in (query, key, value)], dim=2)
        swapped = self._exchange(blocks.transpose(0, 1)).reshape(self.size * share, own + 2 * kept, size)[:num_tokens]
        swapped_query, swapped_key, swapped_value = torch.split(swapped, [own, kept, kept], dim=1)
        return swapped_query, swapped_key, swapped_value

    def heads_to_tokens(self, attended: Tensor) -> Tensor:
        """Exchange heads for tokens after attention: [ceil(T / n), Hq, D] from [T, Hq / n, D]."""
        num_tokens, own, size = attended.shape
        share = self.tokens_per_rank(num_tokens)
        blocks = padded(attended, share * self.size).view(self.size, share, own, size)
        return self._exchange(blocks).transpose(0, 1).reshape(share, self.size * own, size)

    def _exchange(self, blocks: Tensor) -> Tensor:
        exchanged: Tensor = _AllToAll.apply(blocks.contiguous(), self)  # type: ignore[no-untyped-call]  # as above
        return exchanged


def check_heads(num_heads: int, size: int) -> None:
    """Refuse a group that cannot split the query heads evenly.

    Raises:
        ModelError: ``size`` does not divide ``num_heads``.
    """
    if num_heads % size:
        raise ModelError(
            f"Ulysses splits {num_heads} query heads over {size} ranks, but {size} does not divide {num_heads};"
            f" set ulysses to a divisor of {num_heads}."
        )


def key_heads_of_ranks(num_heads: int, num_key_heads: int, size: int) -> list[int]:
    """Return the key-value heads of each rank, rank by rank, the same number for all.

    Rank j attends with query heads [j h, (j + 1) h), h = ``num_heads / size``; query head i uses key-value head i //
    (``num_heads / num_key_heads``). Heads are copied only if several ranks need the same one; if a rank's query heads
    would share key-value heads unevenly, it gets one for each query head. Example: 4 query heads, 2 key-value heads and
    4 ranks give ``[0, 0, 1, 1]``.
    """
    per_rank, per_key = num_heads // size, num_heads // num_key_heads
    used = [[i // per_key for i in range(rank * per_rank, (rank + 1) * per_rank)] for rank in range(size)]
    distinct = [sorted(set(heads)) for heads in used]
    even = len({len(unique) for unique in distinct}) == 1 and all(
        [head for head in unique for _ in range(per_rank // len(unique))] == heads
        for unique, heads in zip(distinct, used, strict=True)
    )
    return [head for heads in (distinct if even else used) for head in heads]


class _AllToAll(torch.autograd.Function):
    """All-to-all of [n, ...]: block j goes to rank j; block i of the result comes from rank i."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, ulysses: UlyssesGroup) -> Tensor:
        ctx.ulysses = ulysses
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=ulysses.group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        received = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, gradient.contiguous(), group=ctx.ulysses.group)
        return received, None
