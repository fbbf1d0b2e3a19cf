"""The two parts of Megatron-Core's layers that the local layer specification lacks: attention over packed rows, and a
norm that allows sequence parallelism. Both are named in the layer specification; nothing is patched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from chatlearn_hf.varlen_attention import PackedLayout, varlen_attention_forward


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]  # Megatron-Core is not typed
    """What attention needs to know of a packed row. Megatron-Core passes it from the model to each layer."""

    layout: PackedLayout = field(default_factory=lambda: PackedLayout([]))
    rotary: tuple[Tensor, Tensor] | None = None
    """Cosines and sines [1, R, D] of this rank's tokens; None for models with learned positions."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer of the whole model; empty if there is none."""


class PackedAttention(MegatronModule):  # type: ignore[misc]  # as above
    """Causal attention inside each sequence of a packed row; see ``chatlearn_hf.varlen_attention``.

    Rotary embeddings are those of the transformers architecture, applied here at each token's position in its sequence.
    Context parallel ranks exchange tokens for heads before attention, and back after it.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self._layer = layer_number - 1
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return [R, 1, heads * D] from query [R, 1, heads, D], and key and value [R, 1, kv heads, D]."""
        assert isinstance(packed_seq_params, PackedRows), "the model passes packed rows"
        assert attention_mask is None, "the layout says which tokens see each other"
        rows = packed_seq_params
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        if rows.rotary is not None:
            query, key = apply_rotary_pos_emb(query, key, *rows.rotary)
        attended, _ = varlen_attention_forward(
            self,
            query,
            key,
            value,
            None,
            packed_layout=rows.layout,
            scaling=self._scale,
            sliding_window=rows.windows[self._layer] if rows.windows else None,
        )
        return attended.flatten(2).transpose(0, 1)


class RMSNorm(torch.nn.RMSNorm):
    """RMS norm whose weight is marked for Megatron-Core, which sums its gradient over sequence parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by Megatron-Core


class LayerNorm(torch.nn.LayerNorm):
    """Layer norm, marked in the same way."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # as above
