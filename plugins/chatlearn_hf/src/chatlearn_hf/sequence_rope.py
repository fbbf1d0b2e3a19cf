"""Rotary embeddings with length-dependent frequencies, computed for each sequence from its own length.

transformers derives the frequencies of ``dynamic`` and ``longrope`` embeddings from the longest sequence of a forward
pass, and keeps those of ``dynamic`` for later passes. A token's state would then depend on the other sequences of its
batch.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

LENGTH_DEPENDENT = ("dynamic", "longrope")


def give_each_sequence_its_rope(model: nn.Module) -> bool:
    """Make the model's length-dependent rotary embeddings compute each sequence separately. Returns whether it has any.

    Positions separate the sequences: a new one starts where positions restart. Padding after a sequence repeats its
    last position. A repeated call changes nothing.
    """
    found = False
    for module in model.modules():
        if _kinds(module):
            found = True
            if "forward" not in module.__dict__:
                # Set an instance attribute instead of wrapping the module, which would rename its buffers.
                module.forward = partial(_forward_each_sequence, module, module.forward)
    return found


def _kinds(module: nn.Module) -> list[str]:
    """Return the length-dependent types of a rotary embedding, which may have a type for each type of layer."""
    if not any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
        return []
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return [name for name in kinds if isinstance(name, str) and any(part in name for part in LENGTH_DEPENDENT)]


def _forward_each_sequence(
    module: nn.Module, forward: Any, x: Tensor, position_ids: Tensor, *rest: Any, **named: Any
) -> Any:
    if position_ids.dim() != 2:  # multi-dimensional positions, for images
        return forward(x, position_ids, *rest, **named)
    rows: list[Any] = []
    for row in position_ids:
        begins = (row[1:] < row[:-1]) | (row[1:] == 0)
        bounds = [0, *(torch.nonzero(begins).squeeze(-1) + 1).tolist(), row.shape[0]]
        parts: list[Any] = []
        for start, stop in itertools.pairwise(bounds):
            _reset_length(module)
            parts.append(forward(x, row[None, start:stop], *rest, **named))
        rows.append(_joined(parts, dim=1))
    _reset_length(module)
    return _joined(rows, dim=0)


def _joined(parts: list[Any], dim: int) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim)
    return tuple(torch.cat(pieces, dim) for pieces in zip(*parts, strict=True))


def _reset_length(module: Any) -> None:
    """Restore the frequencies of the original length, which ``dynamic`` embeddings replace when they see a longer
    sequence.
    """
    original = getattr(module, "original_max_seq_len", None)
    for name in list(vars(module)):
        if not name.endswith("max_seq_len_cached") or original is None or vars(module)[name] == original:
            continue
        prefix = name.removesuffix("max_seq_len_cached")
        inverse = getattr(module, f"{prefix}original_inv_freq", None)
        current = getattr(module, f"{prefix}inv_freq", None)
        if isinstance(inverse, Tensor) and isinstance(current, Tensor):
            setattr(module, f"{prefix}inv_freq", inverse.to(current.device))
        setattr(module, name, original)
