"""Ulysses sequence parallelism [2309.14509]: ranks share a packed row by tokens, and swap to heads inside attention.

Each rank of a group holds 1/n of the row's tokens through the whole model. Around attention one all-to-all trades
tokens for heads, so that a rank sees the whole row for 1/n of the heads, and another trades them back. Both are their
own transposes, so gradients travel the same way. What leaves the model is gathered into canonical order; since every
rank of the group then computes the same loss from it, a rank's gradient is its own slice of what arrives, unscaled, and
the *sum* over the group is the gradient of that loss.
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
        group: their process group, in the order in which they take the row's tokens.
    """

    __slots__ = ("group", "rank", "size")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def tokens_per_rank(self, num_tokens: int) -> int:
        """Tokens that every rank holds of a row of ``num_tokens``, padding at the row's end included."""
        return -(-num_tokens // self.size)

    def split(self, values: Tensor) -> Tensor:
        """[ceil(T / n), ...] this rank's part of [T, ...]; zeros where the row has ended."""
        share = self.tokens_per_rank(values.shape[0])
        part = values[self.rank * share : (self.rank + 1) * share]
        return _padded(part, share)

    def gather(self, part: Tensor, num_tokens: int) -> Tensor:
        """[T, ...] from every rank's [ceil(T / n), ...]; the gradient of a part is its slice of the whole's gradient.

        The whole must be used alike on all ranks: gradients are not added up here.
        """
        whole: Tensor = _GatherRows.apply(part, self)  # type: ignore[no-untyped-call]  # torch does not annotate it
        return whole[:num_tokens]

    def tokens_to_heads(
        self, query: Tensor, key: Tensor, value: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Trade tokens for heads before attention, in one all-to-all.

        With fewer key-value heads than ranks, or a number that does not divide, each rank gets copies of those that its
        query heads attend to; their gradients add up.

        Args:
            query: [ceil(T / n), Hq, D]
            key: [ceil(T / n), Hkv, D]
            value: like ``key``.
            num_tokens: T

        Returns:
            [T, Hq / n, D] and twice [T, heads, D], where ``heads`` divides Hq / n.

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
        """[ceil(T / n), Hq, D] from [T, Hq / n, D]: back after attention."""
        num_tokens, own, size = attended.shape
        share = self.tokens_per_rank(num_tokens)
        blocks = _padded(attended, share * self.size).view(self.size, share, own, size)
        return self._exchange(blocks).transpose(0, 1).reshape(share, self.size * own, size)

    def _exchange(self, blocks: Tensor) -> Tensor:
        exchanged: Tensor = _AllToAll.apply(blocks.contiguous(), self)  # type: ignore[no-untyped-call]  # as above
        return exchanged


def check_heads(num_heads: int, size: int) -> None:
    """Refuse a group that cannot share the query heads evenly.

    Raises:
        ModelError: ``size`` does not divide ``num_heads``.
    """
    if num_heads % size:
        raise ModelError(
            f"Ulysses shares the {num_heads} query heads over {size} ranks, and {size} does not divide {num_heads};"
            f" set ulysses to a divisor of {num_heads}."
        )


def key_heads_of_ranks(num_heads: int, num_key_heads: int, size: int) -> list[int]:
    """Which key-value heads go to each rank, rank by rank and the same number for all.

    Rank j attends with query heads [j h, (j + 1) h), h = ``num_heads / size``; query head i uses key-value head
    i // (``num_heads / num_key_heads``). Copies are made only where ranks need the same one; where a rank's query heads
    would share key-value heads unevenly, it gets one for each query head.
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
    """``values`` with zeros behind it, [rows, ...]."""
    missing = rows - values.shape[0]
    return values if not missing else torch.cat([values, values.new_zeros(missing, *values.shape[1:])])


class _AllToAll(torch.autograd.Function):
    """[n, ...]: block j goes to rank j; block i of the result came from rank i."""

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
    """[n * rows, ...] from [rows, ...]; see ``UlyssesGroup.gather``."""

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
