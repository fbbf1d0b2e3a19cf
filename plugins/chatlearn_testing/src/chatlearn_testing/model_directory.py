"""Reads the safetensors of model directories, and writes copies of model directories with other weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chatlearn_core.types import TensorSpec, WeightManifest


def read_checkpoint(directory: Path) -> dict[str, Tensor]:
    """Read every tensor in a directory's safetensors files, by checkpoint name."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    assert tensors, f"{directory} contains no safetensors files; the suites need a model with weights in safetensors"
    return tensors


def manifest_of(tensors: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None) -> WeightManifest:
    """Build the manifest of these tensors."""
    specs = {
        name: TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }
    return WeightManifest(specs, aliases or {})


def perturbed(tensors: Mapping[str, Tensor], *, seed: int, scale: float = 0.5) -> dict[str, Tensor]:
    """Add Gaussian noise to every tensor, ``scale`` times the tensor's standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + scale * tensor.float().std(correction=0) * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
    }


def copy_with_weights(directory: Path, tensors: Mapping[str, Tensor], target: Path) -> Path:
    """Copy a model directory to ``target`` with ``tensors`` as its weights; returns ``target``."""
    target.mkdir(parents=True)
    for entry in directory.iterdir():
        if entry.is_file() and ".safetensors" not in entry.name:
            shutil.copy(entry, target / entry.name)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", {"format": "pt"}
    )
    return target
