"""What chatlearn-hf registers: how Hugging Face model directories are read."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import ModelFamilySpec


@hookimpl
def chatlearn_model_families() -> Iterable[ModelFamilySpec]:
    """The family of every model directory that transformers can read."""
    return [
        ModelFamilySpec(
            name="transformers",
            summary="Model directories and hub ids that transformers reads.",
            factory="chatlearn_hf.family:TransformersFamily",
            options="chatlearn_hf.options:TransformersFamilyOptions",
        )
    ]
