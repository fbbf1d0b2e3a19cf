"""Fixtures shared by the suites of backends that hold a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_testing.process_state import TORCH_RANDOM_STATE
from chatlearn_testing.suites.conformance_suite import ReferenceLoader


class ModelSuite:
    """A model directory, and a reference implementation of its model.

    The directory is a fixture ``model_directory`` of class scope or wider, which a module, a ``conftest.py`` or the
    subclass defines: a small float32 model with its weights in safetensors and a vocabulary of 32 tokens or more.
    """

    settable: ClassVar[frozenset[str]] = frozenset({"model_directory", "load_reference", "device"})
    load_reference: ClassVar[ReferenceLoader | str]
    """A ``ReferenceLoader``, or its import string."""
    device: ClassVar[str] = "cpu"
    may_change: ClassVar[frozenset[str]] = frozenset({TORCH_RANDOM_STATE})
    """Building a model draws from torch's generator; tests of their own look for seeds."""

    @pytest.fixture(scope="class")
    @classmethod
    def load_plain(cls) -> ReferenceLoader:
        """``load_reference``, imported if it is an import string."""
        found: Any = cls.load_reference
        loader: ReferenceLoader = resolve_import_string(found) if isinstance(found, str) else found
        return loader

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, load_plain: ReferenceLoader, model_directory: Path) -> torch.nn.Module:
        """The model directory loaded as a plain module."""
        return load_plain(model_directory)
