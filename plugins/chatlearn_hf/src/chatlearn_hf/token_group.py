"""Ranks that share the tokens of a packed row: each holds 1/n of them through the whole model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class TokenGroup:
    """The ranks that share each packed row.

    Outputs are gathered in canonical order. Every rank of the group then computes the same loss from them, so a rank's
    gradient is its own slice of the incoming gradient, unscaled, and the *sum* over the group is the gradient of that
    loss.

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
        return padded(part, share)

    def gather(self, part: Tensor, num_tokens: int) -> Tensor:
        """Gather [T, ...] from every rank's [ceil(T / n), ...]; a part's gradient is its slice of the whole gradient.

        All ranks must use the result in the same way, because gradients are not summed here.
        """
        whole: Tensor = _GatherRows.apply(part, self)  # type: ignore[no-untyped-call]  # torch does not annotate it
        return whole[:num_tokens]


def padded(values: Tensor, rows: int) -> Tensor:
    """Return ``values`` with zeros appended, [rows, ...]."""
    missing = rows - values.shape[0]
    if not missing:
        return values
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])])


class _GatherRows(torch.autograd.Function):
    """All-gather of [n * rows, ...] from [rows, ...]; see ``TokenGroup.gather``."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TokenGroup) -> Tensor:
        ctx.ranks, ctx.rows = ranks, part.shape[0]
        whole = part.new_empty(ranks.size * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=ranks.group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        first = ctx.ranks.rank * ctx.rows
        return gradient[first : first + ctx.rows].contiguous(), None
