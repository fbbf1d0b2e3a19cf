"""Ring attention [2310.01889]: ranks split a packed row by tokens, and pass keys and values on while each attends with
its own queries.

Attention is causal, so keys and values travel from each rank to the next ones only, and no further than the longest
sequence reaches: a row of short sequences needs one step. Each rank keeps the softmax of its queries over the blocks
that came by as a maximum and a sum. The backward pass sends the blocks once more, together with their gradients, which
then go home. Scores are float32, and exist for a bounded number of queries at a time.

Unlike Ulysses it needs no divisor of the number of heads, and each rank holds all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.padded_attention import ScoreRule
from chatlearn_hf.token_group import TokenGroup

MAX_SCORES = 1 << 25
"""Scores that are held at once: 128 MiB in float32."""


class RingGroup(TokenGroup):
    """Ranks that pass keys and values on in attention."""

    __slots__ = ()

    def reach(self, position_ids: Tensor, window: int | None) -> Reach:
        """Return what the tokens of a whole row see; see ``Reach``."""
        share = self.tokens_per_rank(len(position_ids))
        token = torch.arange(share * self.size, device=position_ids.device)
        first = token.clone()
        first[: len(position_ids)] -= position_ids
        if window is not None:
            first = torch.maximum(first, token - window + 1)
        return Reach(first, first[::share].tolist(), share)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, reach: Reach, rule: ScoreRule) -> Tensor:
        """Causal attention inside each sequence.

        Args:
            query: [ceil(T / n), Hq, D], this rank's tokens.
            key: [ceil(T / n), Hkv, D], Hkv divides Hq.
            value: [ceil(T / n), Hkv, Dv]
            reach: of the row, under the rule's window.
            rule: of the scores; without dropout.

        Returns:
            [ceil(T / n), Hq, Dv]

        Raises:
            ModelError: the layer drops probabilities.
        """
        if rule.dropout:
            raise ModelError(
                f"ring attention does not drop probabilities, but the layer's dropout is {rule.dropout:g}; set the"
                " model's attention_dropout to 0, or ring to 1"
            )
        scaling = rule.scaling if rule.scaling is not None else float(query.shape[-1]) ** -0.5
        attended: Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]  # torch does not annotate it
            query, key, value, rule.sinks, self, reach, scaling, rule.softcap
        )
        return attended


@dataclass(slots=True, frozen=True)
class Reach:
    """Which tokens of a packed row each token attends to, and how the ranks divide the row."""

    first_seen: Tensor
    """[n * share] int64: each token attends to the tokens from this one to itself. Tokens beyond the row's end see
    themselves alone."""
    first_of_rank: list[int]
    """First token that any token of a rank attends to, rank by rank."""
    share: int
    """Tokens of each rank; the tokens of one rank are a block."""

    @property
    def steps(self) -> int:
        """How many ranks back a rank must look, at most."""
        return max(rank - first // self.share for rank, first in enumerate(self.first_of_rank))

    def meets(self, rank: int, block: int) -> bool:
        """Whether any query of a rank attends to any key of a block."""
        return block <= rank and self.first_of_rank[rank] < (block + 1) * self.share

    def sees(self, rank: int, block: int, queries: slice) -> Tensor:
        """[queries, share] bool: which of a rank's queries attend to which keys of a block."""
        places = torch.arange(self.share, device=self.first_seen.device)
        token, other = (rank * self.share + places)[queries, None], block * self.share + places
        return (other <= token) & (other >= self.first_seen[token])


class _RingAttention(torch.autograd.Function):
    """Attention with blocks of keys and values that come from earlier ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        ring: RingGroup,
        reach: Reach,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        blocks = _Blocks(query, key.shape[1], ring, reach, scaling, softcap)
        maximum = query.new_full((*blocks.query.shape[:3], 1), -torch.inf, dtype=torch.float32)
        total = torch.zeros_like(maximum)
        weighted = query.new_zeros(*blocks.query.shape[:3], value.shape[-1], dtype=torch.float32)
        for block, (keys, values) in blocks.travel(key, value):
            for part in blocks.parts(block):
                scores = blocks.scores(keys, block, part)
                before, after = maximum[:, :, part], scores.amax(-1, keepdim=True)
                after = torch.maximum(before, after)
                probabilities = (scores - after).exp_()
                kept = (before - after).exp_()
                total[:, :, part] = total[:, :, part] * kept + probabilities.sum(-1, keepdim=True)
                weighted[:, :, part] = weighted[:, :, part] * kept + probabilities @ values
                maximum[:, :, part] = after
        normaliser = maximum + total.log()
        if sinks is not None:
            normaliser = torch.logaddexp(normaliser, _by_head(sinks, normaliser))
        output = weighted * (maximum - normaliser).exp()
        attended = _to_tokens(output, query.dtype)
        ctx.save_for_backward(query, key, value, sinks, attended, normaliser)
        ctx.rest = ring, reach, scaling, softcap
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, attended, normaliser = ctx.saved_tensors
        ring, reach, scaling, softcap = ctx.rest
        blocks = _Blocks(query, key.shape[1], ring, reach, scaling, softcap)
        output_gradient = _to_heads(gradient, key.shape[1]).float()
        shift = (output_gradient * _to_heads(attended, key.shape[1])).sum(-1, keepdim=True)
        query_gradient = torch.zeros_like(blocks.query)
        carried: dict[int, tuple[Tensor, Tensor]] = {}
        """Block -> gradients of its keys and values, as far as they are known here."""
        for block, (keys, values) in blocks.travel(key, value, carried):
            key_gradient, value_gradient = carried[block]
            for part in blocks.parts(block):
                capped = blocks.scores(keys, block, part)
                probabilities = (capped - normaliser[:, :, part]).exp()
                given = output_gradient[:, :, part]
                value_gradient += (probabilities.transpose(-1, -2) @ given).sum(1)
                slope = probabilities * (given @ values.transpose(-1, -2) - shift[:, :, part])
                if softcap is not None:
                    slope *= 1 - (capped.nan_to_num(neginf=0.0) / softcap).square()
                slope *= scaling
                query_gradient[:, :, part] += slope @ keys
                key_gradient += (slope.transpose(-1, -2) @ blocks.query[:, :, part]).sum(1)
        key_gradient, value_gradient = blocks.bring_home(carried, key, value)
        sink_gradient = None
        if sinks is not None:
            pulled = (_by_head(sinks, normaliser) - normaliser).exp() * shift
            sink_gradient = -pulled.sum((2, 3)).reshape(-1).to(sinks.dtype)
        return (
            _to_tokens(query_gradient, query.dtype),
            key_gradient.transpose(0, 1).to(key.dtype),
            value_gradient.transpose(0, 1).to(value.dtype),
            sink_gradient,
            *[None] * 4,
        )


class _Blocks:
    """One rank's queries, and the blocks of keys and values that come by.

    Args:
        query: [share, Hq, D]
        num_key_heads: Hkv
    """

    def __init__(
        self, query: Tensor, num_key_heads: int, ring: RingGroup, reach: Reach, scaling: float, softcap: float | None
    ) -> None:
        self.query = _to_heads(query, num_key_heads).float()
        """[Hkv, Hq / Hkv, share, D]"""
        self._ring, self._reach, self._scaling, self._softcap = ring, reach, scaling, softcap
        self._step = max(1, MAX_SCORES // max(1, query.shape[1] * query.shape[0]))

    def parts(self, block: int) -> Iterator[slice]:
        """The queries that meet a block, a bounded number at a time."""
        if self._reach.meets(self._ring.rank, block):
            for start in range(0, self._reach.share, self._step):
                yield slice(start, min(start + self._step, self._reach.share))

    def scores(self, keys: Tensor, block: int, part: slice) -> Tensor:
        """[Hkv, Hq / Hkv, queries, share], -inf for what a query does not see."""
        scores = self.query[:, :, part] @ keys.transpose(-1, -2) * self._scaling
        if self._softcap is not None:
            scores = torch.tanh(scores / self._softcap) * self._softcap
        return scores.masked_fill(~self._reach.sees(self._ring.rank, block, part), -torch.inf)

    def travel(
        self, key: Tensor, value: Tensor, carried: dict[int, tuple[Tensor, Tensor]] | None = None
    ) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Yield (block, its keys and values in float32 [Hkv, 1, share, D or Dv]), first this rank's own.

        Args:
            key: [share, Hkv, D] of this rank.
            value: [share, Hkv, Dv]
            carried: block -> gradients of its keys and values [Hkv, share, D or Dv] in float32, which travel with it.
        """
        rank, last = self._ring.rank, self._ring.size - 1
        rows = torch.cat([key, value], dim=-1).contiguous()
        block = rank
        if carried is not None:
            carried[block] = _zeros(key), _zeros(value)
        for step in range(self._reach.steps + 1):
            passes_on = step < self._reach.steps and block >= 0 and rank < last
            takes = step < self._reach.steps and block > 0
            following = torch.empty_like(rows)
            moves = self._exchange([rows] if passes_on else [], [following] if takes else [])
            if block >= 0:
                heads = rows.transpose(0, 1).float().unsqueeze(1)
                yield block, (heads[..., : key.shape[-1]], heads[..., key.shape[-1] :])
            _wait(moves)
            if carried is not None:
                sent = carried.pop(block) if passes_on else ()
                if takes:
                    carried[block - 1] = _zeros(key), _zeros(value)
                _wait(self._exchange(sent, carried[block - 1] if takes else ()))
            rows, block = following, block - 1

    def bring_home(
        self, carried: dict[int, tuple[Tensor, Tensor]], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Send gradients to the ranks of their blocks; return those of this rank's ``key`` and ``value``."""
        rank = self._ring.rank
        holder = min(rank + self._reach.steps, self._ring.size - 1)
        moves = [
            dist.P2POp(dist.isend, tensor, group=self._ring.group, group_peer=block)
            for block, tensors in carried.items()
            if block != rank
            for tensor in tensors
        ]
        if holder == rank:
            own = carried[rank]
        else:
            own = _zeros(key), _zeros(value)
            moves += [dist.P2POp(dist.irecv, tensor, group=self._ring.group, group_peer=holder) for tensor in own]
        _wait(_start(moves))
        return own

    def _exchange(self, sent: Iterable[Tensor], received: Iterable[Tensor]) -> list[dist.Work]:
        """Start to send to the next rank and to receive from the one before."""
        group, rank = self._ring.group, self._ring.rank
        moves = [dist.P2POp(dist.isend, tensor, group=group, group_peer=rank + 1) for tensor in sent]
        moves += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank - 1) for tensor in received]
        return _start(moves)


def _start(moves: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(moves) if moves else []


def _wait(moves: Iterable[dist.Work]) -> None:
    for move in moves:
        move.wait()


def _zeros(rows: Tensor) -> Tensor:
    """[heads, tokens, D] float32 for [tokens, heads, D]."""
    return torch.zeros(rows.shape[1], rows.shape[0], rows.shape[2], device=rows.device)


def _to_heads(rows: Tensor, num_key_heads: int) -> Tensor:
    """[Hkv, Hq / Hkv, tokens, D] from [tokens, Hq, D]."""
    return rows.transpose(0, 1).reshape(num_key_heads, -1, rows.shape[0], rows.shape[2])


def _to_tokens(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens, Hq, D] from [Hkv, Hq / Hkv, tokens, D]."""
    return heads.flatten(0, 1).transpose(0, 1).to(dtype).contiguous()


def _by_head(sinks: Tensor, like: Tensor) -> Tensor:
    """[Hkv, Hq / Hkv, 1, 1] from [Hq]."""
    return sinks.float().view(*like.shape[:2], 1, 1)
