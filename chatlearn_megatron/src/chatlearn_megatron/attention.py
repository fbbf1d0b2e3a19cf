"""The parts of Megatron-Core's layers that the local layer specification lacks: attention over packed rows, and norms
that allow sequence parallelism. All are named in the layer specification; nothing is patched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
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
    interleaved: bool = False
    """Whether rotary dimensions are neighbouring pairs; otherwise the first half is paired with the second."""


class PackedAttention(MegatronModule):  # type: ignore[misc]  # as above
    """Causal attention inside each sequence of a packed row; see ``chatlearn_hf.varlen_attention``.

    Rotary embeddings are those of the transformers architecture, applied here at each token's position in its sequence.
    Context parallel ranks exchange tokens for heads before attention, and back after it.
    """

    rotates: ClassVar[bool] = True

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
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
        if self.rotates and rows.rotary is not None:
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


class PackedLatentCore(PackedAttention):
    """``PackedAttention`` for queries and keys whose rotary part is rotated before they come here."""

    rotates = False


class PackedLatentAttention(MLASelfAttention):  # type: ignore[misc]  # Megatron-Core is not typed
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434) over packed rows, with the rotary embeddings of
    the transformers architecture.

    Tensor parallel ranks compute parts of the latents, gather them, and have heads of their own.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return query and key [R, 1, heads, D], value [R, 1, heads, D of values], and the latents of both."""
        assert isinstance(packed_seq_params, PackedRows), "the model passes packed rows"
        config, rows = self.config, packed_seq_params
        assert rows.rotary is not None, "latent attention has rotary positions"
        latent = hidden_states
        if config.q_lora_rank is None:
            query = self.linear_q_proj(hidden_states)[0]
        else:
            latent = self.q_layernorm(self._split_over_tokens(self._gathered(self.linear_q_down_proj, hidden_states)))
            query = self.linear_q_up_proj(latent)[0]
        both = self._gathered(self.linear_kv_down_proj, hidden_states)
        shared, turned = torch.split(both, [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        shared = self.kv_layernorm(self._split_over_tokens(shared))
        # Every head uses the rotary key, so its gradient is a sum over the ranks' heads.
        turned = copy_to_tensor_model_parallel_region(turned, group=self.pg_collection.tp)[:, :, None]
        heads = self.num_attention_heads_per_partition
        query = query.unflatten(-1, (heads, self.q_head_dim))
        straight, query_turned = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        expanded = self.linear_kv_up_proj(shared)[0].unflatten(-1, (heads, config.qk_head_dim + config.v_head_dim))
        key, value = expanded.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        rotate = apply_rotary_pos_emb_interleave if rows.interleaved else apply_rotary_pos_emb
        query_turned, turned = rotate(
            query_turned.transpose(0, 1), turned.transpose(0, 1), *rows.rotary, unsqueeze_dim=2
        )
        query = torch.cat([straight, query_turned.transpose(0, 1)], dim=-1)
        key = torch.cat([key, turned.transpose(0, 1).expand(-1, -1, heads, -1)], dim=-1)
        return query, key, value, latent, shared

    def _gathered(self, linear: torch.nn.Module, hidden_states: Tensor) -> Tensor:
        """Return the whole output [R, 1, N] of a linear layer whose output is split over the tensor parallel ranks."""
        output: Tensor = gather_from_tensor_model_parallel_region(linear(hidden_states)[0], group=self.pg_collection.tp)
        return output

    def _split_over_tokens(self, values: Tensor) -> Tensor:
        """Return this rank's tokens, if tensor parallel ranks share them outside the layers that are split."""
        if self.config.sequence_parallel:
            values = scatter_to_sequence_parallel_region(values, group=self.pg_collection.tp)
        return values


class RMSNorm(torch.nn.RMSNorm):
    """RMS norm whose weight is marked for Megatron-Core, which sums its gradient over sequence parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by Megatron-Core


class LatentNorm(RMSNorm):
    """The norm of latents, with the constant of the transformers architecture, which no configuration changes."""

    def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


class LayerNorm(torch.nn.LayerNorm):
    """Layer norm, marked in the same way."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # as above
