"""Attention over packed sequences that computes nothing across sequence borders and builds no [T, T] mask.

It is registered with transformers' ``AttentionInterface`` as ``chatlearn_varlen``; the model's keyword arguments pass a
``PackedLayout`` to it. Deliberately, no mask function is registered for the name: transformers then prepares no mask.
(A mask of ones, or ``is_causal`` over the packed row, would silently let sequences see each other.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.padded_attention import ScoreRule, attend
from chatlearn_hf.ring_attention import Reach, RingGroup
from chatlearn_hf.token_group import TokenGroup
from chatlearn_hf.ulysses import UlyssesGroup

VARLEN_ATTENTION = "chatlearn_varlen"
"""Value for ``attn_implementation``."""

CALL_SCORES = 6000
"""Attention scores of a head that a CPU computes in about the time of another call of the kernel. Sequences join a
bucket until padding them has cost that much."""

_UNSUPPORTED = ("position_bias", "indices", "alibi", "score_mod")
"""Arguments of attention variants that change the scores, which this implementation does not support."""


class Buckets(NamedTuple):
    """Sequences in groups of similar length, each padded to the longest of its group."""

    shapes: list[tuple[int, int]]
    """(sequences, tokens of each) of every group."""
    gather: Tensor
    """[P] int64, the computed row of every padded row, group after group; padding repeats the sequence's last token,
    which no real token can see."""
    restore: Tensor
    """[R] int64, the padded row of every computed row."""


class PackedLayout:
    """Positions of the S sequences of a packed row, with the index tensors that attention needs, built once per
    micro-batch.

    The trunk computes one row for each of the T tokens, or fewer: tokens with the same state (equal beginnings of
    sequences) may share a computed row. Attention still runs over every whole sequence.

    This is a plain class, not a dataclass, because FSDP's hooks copy dataclass arguments of a module field by field.

    Args:
        lengths: number of tokens of each sequence.
        device: device of the index tensors.
        sharing: the ranks that share the row's tokens; None if this rank holds them all.
        rows: [T] int64, the computed row of each token, all R rows used (``SharedPrompts.rows``); tokens of one row
            must be equal and follow equal tokens. None: each token has its own row. Not allowed with ``sharing``.
    """

    __slots__ = (
        "_buckets",
        "_reaches",
        "cu_seqlens",
        "lengths",
        "max_length",
        "position_ids",
        "row_of_token",
        "sharing",
        "token_of_row",
        "windows",
    )

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        sharing: TokenGroup | None = None,
        rows: Tensor | None = None,
    ) -> None:
        assert rows is None or sharing is None, "ranks that share a row need a computed row for each token"
        self.lengths = list(lengths)
        self.sharing = sharing
        """The ranks that share the row's tokens; None if this rank holds them all."""
        self.max_length = max(self.lengths, default=0)
        sizes = torch.as_tensor(self.lengths, dtype=torch.int64)
        bounds = torch.zeros(len(self.lengths) + 1, dtype=torch.int64)
        torch.cumsum(sizes, 0, out=bounds[1:])
        total = int(bounds[-1])
        starts = torch.repeat_interleave(bounds[:-1], sizes)
        self.position_ids = (torch.arange(total) - starts).to(device)
        """[T] int64, restarting at 0 with every sequence."""
        self.cu_seqlens = bounds.to(torch.int32).to(device)
        """[S + 1] int32"""
        self.row_of_token: Tensor | None = None
        """[T] int64; None if each token has its own row."""
        self.token_of_row: Tensor | None = None
        """[R] int64, the first token of each row; None if each token has its own row."""
        if rows is not None:
            assert rows.shape == (total,), f"{tuple(rows.shape)} rows for {total} tokens"
            token_of_row = torch.full((int(rows.max()) + 1,), total, dtype=torch.int64)
            token_of_row.scatter_reduce_(0, rows, torch.arange(total), "amin")
            self.row_of_token, self.token_of_row = rows.to(device), token_of_row.to(device)
        self._buckets: Buckets | None = None
        self._reaches: dict[int | None, Reach] = {}
        self.windows: set[int] = set()
        """Sliding windows that attention layers have requested."""

    @property
    def num_tokens(self) -> int:
        return int(self.position_ids.shape[0])

    def reach(self, ring: RingGroup, window: int | None) -> Reach:
        """What the tokens see under a sliding window, for the ranks of a ring."""
        if window not in self._reaches:
            self._reaches[window] = ring.reach(self.position_ids, window)
        return self._reaches[window]

    def rows_of(self, tokens: Tensor) -> Tensor:
        """Return the computed rows [N] of the tokens at positions [N] int64."""
        return tokens if self.row_of_token is None else self.row_of_token.index_select(0, tokens)

    def expand(self, rows: Tensor) -> Tensor:
        """Expand computed rows [R, ...] to one row per token, [T, ...]."""
        return rows if self.row_of_token is None else rows.index_select(0, self.row_of_token)

    def reduce(self, tokens: Tensor) -> Tensor:
        """Reduce tokens [T, ...], equal within each row, to the computed rows [R, ...]."""
        return tokens if self.token_of_row is None else tokens.index_select(0, self.token_of_row)

    def padded_rows(self) -> tuple[Tensor, Tensor]:
        """Put each nonempty sequence in its own row, padded to the longest.

        Returns:
            [n, L] int64 token at each position (padding repeats the sequence's last token), and [n, L] bool mask of the
            real positions.
        """
        sizes = torch.as_tensor(self.lengths, dtype=torch.int64)
        starts = (sizes.cumsum(0) - sizes)[sizes > 0]
        sizes = sizes[sizes > 0]
        column = torch.arange(self.max_length)[None, :]
        source = starts[:, None] + torch.minimum(column, sizes[:, None] - 1)
        return source.to(self.position_ids.device), (column < sizes[:, None]).to(self.position_ids.device)

    def buckets(self) -> Buckets:
        """Group sequences of similar length."""
        if self._buckets is None:
            self._buckets = self._make_buckets()
        return self._buckets

    def _make_buckets(self) -> Buckets:
        device = self.position_ids.device
        sizes = torch.as_tensor(self.lengths, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        order = sorted((i for i, n in enumerate(self.lengths) if n), key=lambda i: -self.lengths[i])
        restore = torch.empty(self.num_tokens, dtype=torch.int64)
        shapes: list[tuple[int, int]] = []
        gather: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
        first, offset = 0, 0
        while first < len(order):
            width = self.lengths[order[first]]
            last, padding = first + 1, 0
            while last < len(order):
                padding += width**2 - self.lengths[order[last]] ** 2
                if padding > CALL_SCORES:
                    break
                last += 1
            members = torch.as_tensor(order[first:last])
            column = torch.arange(width)[None, :]
            source = starts[members, None] + torch.minimum(column, sizes[members, None] - 1)
            real = column < sizes[members, None]
            rows = offset + torch.arange(len(members) * width).view(-1, width)
            restore[source[real]] = rows[real]
            shapes.append((len(members), width))
            gather.append(source.reshape(-1))
            offset += len(members) * width
            first = last
        return Buckets(shapes, self.rows_of(torch.cat(gather).to(device)), self.reduce(restore.to(device)))


def register_varlen_attention() -> None:
    """Register ``attn_implementation="chatlearn_varlen"`` with transformers. A repeated call changes nothing."""
    AttentionInterface.register(VARLEN_ATTENTION, varlen_attention_forward)


def varlen_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a packed row, with the interface of transformers' attention functions.

    Args:
        module: the attention layer; used only for its training mode (dropout).
        query: [1, Hq, R, D], the computed rows (R = T unless the layout shares rows); of ranks that share a row, this
            rank's part of the tokens.
        key: [1, Hkv, R, D], Hkv divides Hq.
        value: [1, Hkv, R, Dv].
        attention_mask: must be None.
        packed_layout: positions of the sequences.
        scaling: factor on the scores; None means 1 / sqrt(D).
        dropout: dropout rate on the attention probabilities, in training.
        sliding_window: a token sees itself and the ``sliding_window - 1`` tokens before it; None: all before it.
        softcap: scores s become ``softcap * tanh(s / softcap)``; None leaves them unchanged.
        s_aux: [Hq] scores of attention sinks; None if there are none.
        **arguments: other arguments of the layer; those that change scores are refused.

    Returns:
        [1, R, Hq, Dv], and None for the probabilities.

    Raises:
        ModelError: the layout is missing, a mask was given, or the layer needs an unsupported kind of attention.
    """
    if packed_layout is None or attention_mask is not None or query.shape[0] != 1:
        raise ModelError(
            f"attention {VARLEN_ATTENTION!r} runs packed rows only: it needs packed_layout, no attention mask and a"
            f" batch of 1 (got layout={packed_layout is not None}, mask={attention_mask is not None},"
            f" batch={query.shape[0]}). Call the model through chatlearn_hf.PackedModel, or use attention 'sdpa'."
        )
    for name in _UNSUPPORTED:
        if arguments.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} uses {name!r}, which attention {VARLEN_ATTENTION!r} does not compute"
            )
    if sliding_window is not None:
        packed_layout.windows.add(sliding_window)
    sharing, width = packed_layout.sharing, value.shape[-1]
    probability = dropout if module.training else 0.0
    if isinstance(sharing, RingGroup):
        rule = ScoreRule(scaling, sliding_window, softcap, s_aux, probability)
        query_rows, key_rows, value_rows = (part[0].transpose(0, 1) for part in (query, key, value))
        reach = packed_layout.reach(sharing, sliding_window)
        return sharing.attend(query_rows, key_rows, value_rows, reach, rule).unsqueeze(0), None
    ulysses = sharing if isinstance(sharing, UlyssesGroup) else None
    if ulysses is not None and query.shape[-1] != width:  # Ulysses exchanges query, key and value together
        scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
        query, key, value = _equally_wide(query, key, value)
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    if ulysses is not None:
        if s_aux is not None:
            own = s_aux.shape[0] // ulysses.size
            s_aux = s_aux[ulysses.rank * own : (ulysses.rank + 1) * own]
        rows = ulysses.tokens_to_heads(*rows, packed_layout.num_tokens)
    rule = ScoreRule(scaling, sliding_window, softcap, s_aux, probability)
    if _flash_fits(query, value, rule):
        # The kernel takes sequences that lie end to end.
        query_rows, key_rows, value_rows = (packed_layout.expand(part) for part in rows)
        output = packed_layout.reduce(
            _flash_varlen(query_rows, key_rows, value_rows, packed_layout, scaling, sliding_window)
        )
    else:
        output = _padded(*rows, packed_layout, rule)
    if ulysses is not None:
        output = ulysses.heads_to_tokens(output)
    return output[..., :width].unsqueeze(0), None


def _equally_wide(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad heads with zeros to equal width, which changes neither scores nor the first dimensions of the output."""
    width = max(query.shape[-1], value.shape[-1])
    wide_query, wide_key, wide_value = (
        part if part.shape[-1] == width else nn.functional.pad(part, (0, width - part.shape[-1]))
        for part in (query, key, value)
    )
    return wide_query, wide_key, wide_value


def _flash_fits(query: Tensor, value: Tensor, rule: ScoreRule) -> bool:
    """Whether flash attention's kernel applies: CUDA, half precision, heads up to 256, no dropout and no
    score changes.
    """
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and max(query.shape[-1], value.shape[-1]) <= 256
        and rule.dropout == 0.0
        and rule.softcap is None
        and rule.sinks is None
    )


def _flash_varlen(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None, window: int | None
) -> Tensor:
    # Imported here because the module probes for CUDA kernels, which a CPU run does not need.
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest, width = layout.cu_seqlens, layout.max_length, value.shape[-1]
    if query.shape[-1] != width:
        scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
        query, key, value = _equally_wide(query, key, value)
    output = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor), "no auxiliary output was asked for"
    return output[..., :width]


def _padded(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, rule: ScoreRule) -> Tensor:
    """Return [R, H, Dv] from rows [R, H, D], with one call for each bucket of similar lengths."""
    shapes, gather, restore = layout.buckets()
    heads, size = query.shape[1], value.shape[2]
    if not shapes:
        return query.new_zeros(query.shape[0], heads, size)
    # All buckets at once: the gradient of each gathering would be as large as all rows.
    sizes = [count * width for count, width in shapes]
    padded = (torch.split(rows.index_select(0, gather), sizes) for rows in (query, key, value))
    outputs: list[Tensor] = []
    for (count, width), *parts in zip(shapes, *padded, strict=True):
        q, k, v = (rows.view(count, width, *rows.shape[1:]).transpose(1, 2) for rows in parts)
        outputs.append(attend(q, k, v, rule).transpose(1, 2).reshape(count * width, heads, size))
    return torch.cat(outputs).index_select(0, restore)
