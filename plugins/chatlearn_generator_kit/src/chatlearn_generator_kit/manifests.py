"""The manifest of tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from chatlearn_core.types import TensorSpec, WeightManifest


def manifest_of(tensors: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None) -> WeightManifest:
    """Return the names, shapes and dtypes of tensors, as ``WeightLoader.expected_manifest`` reports them.

    Args:
        tensors: checkpoint name -> tensor, tied tensors once.
        aliases: second name of a tied tensor -> its name in ``tensors``.
    """
    specs = {
        name: TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }
    return WeightManifest(specs, aliases or {})
