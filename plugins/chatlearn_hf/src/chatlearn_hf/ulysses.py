"""Ulysses sequence parallelism [2309.14509]: ranks split a packed row by tokens, and exchange tokens for heads in
attention.

Each rank of a group holds 1/n of the row's tokens through the whole model. Before attention one all-to-all exchanges
tokens for heads, so that a rank sees the whole row for 1/n of the heads; another one reverses it afterwards. Both are
their own transposes, so gradients take the same way. Outputs are gathered in canonical order. Every rank of the group
then computes the same loss from them, so a rank's gradient is its own slice of the incoming gradient, unscaled, and the
*sum* over the group is the gradient of that loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from chatlearn_core.exceptions import ModelError


class UlyssesGroup:
    """The ranks that share each packed row.

    Args:
        group: process group of the ranks, in the order in which they hold the row's tokens.
    """

    __slots__ = ("group", "rank", "size")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def tokens_per_rank(self, num_tokens: int) -> int:
        """Number of tokens that every rank holds of a row of ``num_tokens``, including padding at the row's end."""
        return -(-num_tokens // self.size)

    def split(self, values: Tensor) -> Tensor:
        """Return this rank's part [ceil(T / n), ...] of [T, ...], with zeros beyond the row's end."""
        share = self.tokens_per_rank(values.shape[0])
        part = values[self.rank * share : (self.rank + 1) * share]
        return _padded(part, share)

    def gather(self, part: Tensor, num_tokens: int) -> Tensor:
        """Gather [T, ...] from every rank's [ceil(T / n), ...]; a part's gradient is its slice of the whole gradient.

        All ranks must use the result in the same way, because gradients are not summed here.
        """
        whole: Tensor = _GatherRows.apply(part, self)  # type: ignore[no-untyped-call]  # torch does not annotate it
        return whole[:num_tokens]

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
        blocks = _padded(attended, share * self.size).view(self.size, share, own, size)
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


def _padded(values: Tensor, rows: int) -> Tensor:
    """Return ``values`` with zeros appended, [rows, ...]."""
    missing = rows - values.shape[0]
    return values if not missing else torch.cat([values, values.new_zeros(missing, *values.shape[1:])])


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


class _GatherRows(torch.autograd.Function):
    """All-gather of [n * rows, ...] from [rows, ...]; see ``UlyssesGroup.gather``."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ulysses: UlyssesGroup) -> Tensor:
        ctx.ulysses, ctx.rows = ulysses, part.shape[0]
        whole = part.new_empty(ulysses.size * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=ulysses.group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        first = ctx.ulysses.rank * ctx.rows
        return gradient[first : first + ctx.rows].contiguous(), None
