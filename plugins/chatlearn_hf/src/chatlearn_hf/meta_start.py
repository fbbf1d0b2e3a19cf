"""Starts a model without ever holding it whole: structure on the ``meta`` device, then each tensor by slices.

``build_on_meta`` creates the structure, a trainer shards it and allocates memory, ``restore_buffers`` computes the
buffers that no checkpoint contains (rotary frequencies), and ``CheckpointFiles`` reads rows of tensors by their
checkpoint names.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from chatlearn_core.exceptions import ModelError
from chatlearn_core.protocols import Head
from chatlearn_core.types import Box
from chatlearn_hf.checkpoint_names import CheckpointLayout
from chatlearn_hf.heads import HEAD_CLASSES, HEAD_PARAMETERS
from chatlearn_hf.model_directory import attention_implementation, check_model_directory, not_loadable, weight_files


def local_directory(path: str) -> Path:
    """Return the model directory itself, or the directory to which a hub id is downloaded.

    Raises:
        ModelError: the directory is unusable.
    """
    directory = check_model_directory(path)
    if directory is not None:
        return directory
    try:
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise not_loadable("model", path, error) from error


def build_on_meta(
    directory: Path,
    head: Head = "lm",
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "varlen",
    trust_remote_code: bool = False,
    **extra: Any,
) -> PreTrainedModel:
    """Build a model in evaluation mode whose parameters and buffers have shapes but no memory.

    Args:
        directory: model directory.
        head: ``lm``, ``value`` or ``reward``.
        dtype: dtype of the parameters.
        attention: ``varlen``, ``sdpa``, ``eager``.
        trust_remote_code: run modelling code from the model directory.
        **extra: configuration fields to override, and ``experts_implementation``.

    Raises:
        ModelError: the architecture has no class with that head, or an argument is not a field of its configuration.
    """
    how = {"experts_implementation": extra.pop("experts_implementation")} if "experts_implementation" in extra else {}
    if head != "lm":
        extra["num_labels"] = 1
    try:
        config, unused = AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code, return_unused_kwargs=True, **extra
        )
        unused = {name: value for name, value in unused.items() if name in extra}
        if unused:
            raise ModelError(
                f"{', '.join(sorted(unused))} is not a field of {type(config).__name__}. A sharded model is built from"
                " its configuration, so its engine arguments can only be configuration fields and"
                " experts_implementation."
            )
        with torch.device("meta"):
            model: PreTrainedModel = HEAD_CLASSES[head].from_config(
                config,
                dtype=dtype,
                attn_implementation=attention_implementation(attention),
                trust_remote_code=trust_remote_code,
                **how,
            )
    except ModelError:
        raise
    except Exception as error:  # an invalid shape or size may raise anything, wherever it is first used
        raise not_loadable("model", str(directory), error) from error
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    model.eval()  # type: ignore[no-untyped-call]  # transformers does not annotate it
    return model


def restore_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that a checkpoint does not contain, as transformers does for a loaded model.

    Modules with such buffers are initialised again, including their parameters: read the checkpoint afterwards.
    """
    for module in model.modules():
        if module._non_persistent_buffers_set:
            with torch.no_grad():
                model._init_weights(module)  # type: ignore[no-untyped-call]  # as above


class CheckpointFiles:
    """The tensors of a model directory by checkpoint name, read by rows. A context manager: files stay open inside.

    Args:
        directory: model directory.

    Raises:
        ModelError: a file is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = ExitStack()
        self._handle_of: dict[str, Any] = {}

    def __enter__(self) -> CheckpointFiles:
        for file in weight_files(self.directory):
            try:
                handle = self._files.enter_context(safe_open(file, framework="pt"))
                self._handle_of |= dict.fromkeys(handle.keys(), handle)
            except (SafetensorError, OSError) as error:
                self._files.close()
                raise ModelError(
                    f"{file} is truncated or not a safetensors file: {error}. Copy or export it again."
                ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle_of.clear()
        self._files.close()

    def differences(self, layout: CheckpointLayout, head: Head) -> tuple[list[str], list[str]]:
        """Return the layout's tensors that the files lack (except a new head), and those with another shape."""
        optional = () if head == "lm" else HEAD_PARAMETERS
        missing: list[str] = []
        misshapen: list[str] = []
        for entry in layout.tensors:
            for name, shape in zip(entry.names, entry.shapes, strict=True):
                source = self.source(name, layout)
                if source is None:
                    missing += [] if name in optional else [name]
                elif tuple(self._handle_of[source].get_slice(source).get_shape()) != shape:
                    misshapen.append(name)
        return missing, misshapen

    def source(self, name: str, layout: CheckpointLayout) -> str | None:
        """Return the name under which the files contain this tensor, its own or a tied one; None if they lack it."""
        names = [name, *(alias for alias, written in layout.aliases.items() if written == name)]
        return next((found for found in names if found in self._handle_of), None)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Read only rows [first, last) of a tensor's first dimension, to the host, in the file's dtype."""
        rows: Tensor = self._handle_of[name].get_slice(name)[first:last]
        return rows

    def box(self, name: str, box: Box) -> Tensor:
        """Read only a box of a tensor, to the host, in the file's dtype."""
        part: Tensor = self._handle_of[name].get_slice(name)[tuple(slice(first, last) for first, last in box)]
        return part
