"""A Llama forward pass in plain torch over tensors by checkpoint name, whole or a stage of it.

Source: Touvron et al. 2023, as ``transformers`` names the tensors (untied embeddings, no rope scaling).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from chatlearn_core.exceptions import ModelError

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(slots=True, frozen=True)
class LlamaShape:
    """The fields of ``config.json`` that the forward pass needs."""

    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def read(cls, directory: Path) -> LlamaShape:
        """Read the fields from a model directory.

        Raises:
            ModelError: the model is not a Llama with untied embeddings.
        """
        try:
            config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{directory} has no readable config.json: {error}") from error
        if config.get("model_type") != "llama" or config.get("tie_word_embeddings"):
            raise ModelError(f"{directory}: this trainer takes models of type llama with untied embeddings")
        heads = int(config["num_attention_heads"])
        rope: dict[str, Any] = config.get("rope_parameters") or {}
        return cls(
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        )


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of all tensors in a directory's ``model.safetensors`` without reading their values."""
    with _opened(directory) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping


def read_rows(directory: Path, name: str, start: int, stop: int) -> Tensor:
    """Read rows [start, stop) of one tensor as float32."""
    with _opened(directory) as file:
        rows: Tensor = file.get_slice(name)[start:stop]
    return rows.float()


def embed(weights: Mapping[str, Tensor], token_ids: Tensor) -> Tensor:
    """[T, H]"""
    return weights[EMBEDDING][token_ids]


def logits(weights: Mapping[str, Tensor], shape: LlamaShape, hidden: Tensor) -> Tensor:
    """[T, V]"""
    return functional.linear(_norm(hidden, weights[NORM], shape.rms_norm_eps), weights[HEAD])


def run_layers(
    weights: Mapping[str, Tensor], shape: LlamaShape, layers: Sequence[int], hidden: Tensor, lengths: Sequence[int]
) -> Tensor:
    """Run these layers on [T, H]; attention stays within each packed sequence."""
    for layer in layers:
        prefix = f"model.layers.{layer}."

        def weight(name: str, prefix: str = prefix) -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        normed = _norm(hidden, weight("input_layernorm"), shape.rms_norm_eps)
        projected = [functional.linear(normed, weight(f"self_attn.{one}_proj")) for one in "qkv"]
        attended = [
            _attention(shape, *parts)
            for parts in zip(*(torch.split(tensor, list(lengths)) for tensor in projected), strict=True)
        ]
        hidden = hidden + functional.linear(torch.cat(attended), weight("self_attn.o_proj"))
        normed = _norm(hidden, weight("post_attention_layernorm"), shape.rms_norm_eps)
        gated = functional.silu(functional.linear(normed, weight("mlp.gate_proj")))
        hidden = hidden + functional.linear(
            gated * functional.linear(normed, weight("mlp.up_proj")), weight("mlp.down_proj")
        )
    return hidden


def _attention(shape: LlamaShape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[N, heads * D] of one sequence."""
    length, dim = len(query), shape.head_dim
    query, key, value = (tensor.view(length, -1, dim).transpose(0, 1) for tensor in (query, key, value))
    frequencies = shape.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
    query, key = (_rotated(tensor, angles) for tensor in (query, key))
    groups = shape.num_heads // shape.num_key_value_heads
    key, value = (tensor.repeat_interleave(groups, dim=0) for tensor in (key, value))
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attended.transpose(0, 1).reshape(length, -1)


def _rotated(tensor: Tensor, angles: Tensor) -> Tensor:
    half = tensor.shape[-1] // 2
    turned = torch.cat([-tensor[..., half:], tensor[..., :half]], dim=-1)
    return tensor * angles.cos() + turned * angles.sin()


def _norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps))


def _opened(directory: Path) -> Any:
    try:
        return safe_open(directory / "model.safetensors", framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{directory / 'model.safetensors'} cannot be read: {error}") from error
