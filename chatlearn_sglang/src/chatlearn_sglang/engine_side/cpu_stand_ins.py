"""Lets SGLang from PyPI run without a GPU: stand-ins for two compiled packages that PyPI has only for CUDA.

CPU users of SGLang build ``sgl_kernel`` from source; without it, importing SGLang 0.5.23 fails. A real ``sgl_kernel``
is used if installed. ``torchvision`` from PyPI cannot register its operators with a CPU build of torch; SGLang imports
it but calls none of them.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SGL_KERNEL_FILE = Path(__file__).with_name("sgl_kernel_stand_in.py")
_TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Schemas of the operators whose fake implementations torchvision registers on import."""


class StandInFinder:
    """Finder on ``sys.meta_path`` that provides ``sgl_kernel`` if it is missing, and prepares for ``torchvision``."""

    def __init__(self) -> None:
        self._library: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        if name == "torchvision" and self._library is None:
            self._define_torchvision_schemas()
        if name == "sgl_kernel" and importlib.machinery.PathFinder.find_spec(name) is None:
            return importlib.util.spec_from_file_location(name, SGL_KERNEL_FILE)
        return None

    def _define_torchvision_schemas(self) -> None:
        import torch

        self._library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has none
        for schema in _TORCHVISION_SCHEMAS:
            if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
                self._library.define(schema)


def install() -> None:
    """Put the finder first on ``sys.meta_path``, once per process."""
    if not any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, StandInFinder())


def do_without_pinned_memory() -> None:
    """Make requests for pinned memory return ordinary tensors, where torch has no pinned memory.

    SGLang 0.5.23 computes LoRA with torch operators (``lora_backend: torch_native``) and pins small tensors on the way,
    which torch refuses without an accelerator.
    """
    import torch

    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]  # see above
    for name in ("tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, pin_memory: bool = False, **rest: Any) -> Any:
        return function(*args, **rest)

    return call
