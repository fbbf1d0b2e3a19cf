"""Makes CTranslate2's own files of a Hugging Face model directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from ctranslate2.converters import TransformersConverter
from safetensors.torch import save_file
from torch import Tensor

from chatlearn_core.exceptions import ModelError

WEIGHTS = "model.safetensors"


def convert(model: Path, target: Path) -> list[str]:
    """Convert a model directory; return the text of each token id, by which the engine names tokens.

    Raises:
        ModelError: the converter refuses the model; quotes it.
    """
    try:
        TransformersConverter(str(model)).convert(str(target), quantization="float32", force=True)
    except Exception as error:
        raise ModelError(f"CTranslate2 cannot convert {model}: {type(error).__name__}: {error}") from error
    config = target / "config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    # A tokenizer without a beginning of sequence gives null, which the engine refuses. It is never used: token ids come
    # ready-made.
    config.write_text(json.dumps({name: "" if value is None else value for name, value in settings.items()}))
    tokens: list[str] = json.loads((target / "vocabulary.json").read_text(encoding="utf-8"))
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{model}: two token ids have the same text, and CTranslate2 takes tokens by their text")
    return tokens


def write_model(source: Path, tensors: Mapping[str, Tensor], target: Path) -> None:
    """Write a Hugging Face directory: these weights, and every other file of ``source``."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".pt")):
            shutil.copy2(file, target / file.name)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / WEIGHTS, {"format": "pt"})
