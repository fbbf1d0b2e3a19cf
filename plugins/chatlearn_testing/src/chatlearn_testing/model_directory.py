"""Model directories as the suites see them: safetensors by checkpoint name, and copies with other weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chatlearn_core.types import TensorSpec, WeightManifest


def read_checkpoint(directory: Path) -> dict[str, Tensor]:
    """Every tensor in a directory's safetensors files, by checkpoint name."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    assert tensors, f"{directory} holds no safetensors; a model directory for the suites has its weights in them"
    return tensors


def manifest_of(tensors: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None) -> WeightManifest:
    """The manifest of these tensors."""
    specs = {
        name: TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }
    return WeightManifest(specs, aliases or {})


def perturbed(tensors: Mapping[str, Tensor], *, seed: int, scale: float = 0.5) -> dict[str, Tensor]:
    """Other weights of the same model: noise of ``scale`` times each tensor's own spread."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + scale * tensor.float().std(correction=0) * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
    }


def copy_with_weights(directory: Path, tensors: Mapping[str, Tensor], target: Path) -> Path:
    """A copy of a model directory that holds ``tensors`` instead of its own weights."""
    target.mkdir(parents=True)
    for entry in directory.iterdir():
        if entry.is_file() and ".safetensors" not in entry.name:
            shutil.copy(entry, target / entry.name)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", {"format": "pt"}
    )
    return target
