"""Registers the model family ``transformers``, which reads Hugging Face model directories."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import ModelFamilySpec


@hookimpl
def chatlearn_model_families() -> Iterable[ModelFamilySpec]:
    """Register the family of all model directories that transformers can read."""
    return [
        ModelFamilySpec(
            name="transformers",
            summary="Model directories and hub ids that transformers reads.",
            factory="chatlearn_hf.family:TransformersFamily",
            options="chatlearn_hf.options:TransformersFamilyOptions",
        )
    ]
