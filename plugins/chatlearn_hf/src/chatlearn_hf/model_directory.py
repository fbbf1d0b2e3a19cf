"""Checks model directories, with clear error messages, and loads them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.progress_bars import no_progress_bars
from chatlearn_hf.varlen_attention import VARLEN_ATTENTION, register_varlen_attention

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
MAX_JSON_BYTES = 64 << 20
"""Largest accepted configuration or index file; the largest published ones have a few MiB."""
LAYER_FIELDS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_labels",
)
"""Configuration fields that determine the length of lists."""
MANY_LAYERS = 10_000
"""A configuration with more layers than this must have at least as many tensors."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def attention_implementation(attention: str) -> str:
    """Return transformers' name for an ``attention`` option: ``varlen`` is ChatLearn's, others are unchanged."""
    if attention != "varlen":
        return attention
    register_varlen_attention()
    return VARLEN_ATTENTION


def check_model_directory(path: str, *, tokenizer_path: str | None = None) -> Path | None:
    """Check, without loading, that ``path`` has a configuration, readable safetensors and a matching tokenizer.

    Args:
        path: a directory, or a hub id.
        tokenizer_path: location of the tokenizer; None checks the one in ``path``, if any.

    Returns:
        The directory, or None for a hub id, which only loading can check.

    Raises:
        ModelError: says what is missing or wrong, and what to do.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        if _could_be_hub_id(path):
            return None
        raise ModelError(
            f"model path {path!r} is not a directory. Give a Hugging Face model directory"
            f" ({CONFIG_FILE}, {WEIGHTS_FILE}, tokenizer files), or a hub id such as 'Qwen/Qwen3-0.6B'."
        )
    config = read_config_file(directory)
    num_tensors = sum(_num_tensors(file) for file in weight_files(directory))
    check_layers(config, num_tensors, directory / CONFIG_FILE)
    tokens_from = Path(tokenizer_path or path).expanduser()
    if tokens_from.is_dir() and any((tokens_from / name).exists() for name in TOKENIZER_FILES):
        check_tokenizer_fits(load_tokenizer(str(tokens_from)), config, str(directory))
    return directory


def read_config_file(directory: Path) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        ModelError: the file is missing or not JSON.
    """
    file = directory / CONFIG_FILE
    if not file.is_file():
        raise ModelError(f"model directory {directory} has no {CONFIG_FILE}; write one with save_pretrained.")
    content = _read_json(file)
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


def _read_json(file: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        ModelError: the file is unreadable, too large, nested too deeply, or not JSON.
    """
    try:
        size = file.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelError(f"{file} has {size} bytes; a description of a model has at most {MAX_JSON_BYTES}")
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from error
    except RecursionError:
        raise ModelError(f"{file} is nested too deeply to be read") from None
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error


def check_layers(config: Mapping[str, Any], num_tensors: int, file: Path) -> None:
    """Refuse a configuration with far more layers than the weights have tensors, before it allocates long lists.

    Raises:
        ModelError: names the field.
    """
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]
    for section in sections:
        for name in LAYER_FIELDS:
            value = section.get(name)
            if isinstance(value, int) and value > max(MANY_LAYERS, num_tensors):
                raise ModelError(
                    f"{file} says {name}: {value}, but the weights beside it have {num_tensors} tensors. Was it edited?"
                    " Use the configuration that was saved with the weights"
                )


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory, from its index if it has one.

    Raises:
        ModelError: there are none, or the index names a missing file.
    """
    index = directory / INDEX_FILE
    if index.is_file():
        content = _read_json(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
        if not names:
            raise ModelError(f"{index} is not a safetensors index: it has no weight_map that names files")
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ModelError(f"{index} names files outside its directory: {', '.join(map(repr, outside[:4]))}")
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelError(f"{index} names missing files: {', '.join(missing)}. Copy them, or export again.")
        return [directory / name for name in names]
    if (directory / WEIGHTS_FILE).is_file():
        return [directory / WEIGHTS_FILE]
    found = ", ".join(sorted(entry.name for entry in directory.iterdir())[:12]) or "nothing"
    raise ModelError(
        f"model directory {directory} has no weights: expected {WEIGHTS_FILE} or {INDEX_FILE}; found {found}."
        " (Pickled .bin weights are not read: convert them with save_pretrained.)"
    )


def load_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """Return transformers' configuration object of a model directory or hub id.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # each architecture's configuration validates its fields differently
        raise not_loadable("configuration", path, error) from error


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory or hub id.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    directory = Path(path).expanduser()
    if directory.is_dir() and not any((directory / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{directory} has no tokenizer: expected one of {', '.join(TOKENIZER_FILES)}. Put it there, or name a "
            "directory or hub id that has one in model.tokenizer"
        )
    try:
        return AutoTokenizer.from_pretrained(
            str(directory) if directory.is_dir() else path, trust_remote_code=trust_remote_code
        )
    # Tokenizer files are parsed by several libraries, the Rust one raising bare Exception.
    except Exception as error:
        raise not_loadable("tokenizer", path, error) from error


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attention: str = "varlen",
    trust_remote_code: bool = False,
    **extra: Any,
) -> PreTrainedModel:
    """Load a causal language model in evaluation mode, every tensor from the checkpoint.

    Args:
        path: model directory or hub id.
        dtype: dtype of the parameters.
        device: device of the parameters.
        attention: ``varlen`` (packed rows), or a name that transformers knows (``sdpa``, ``eager``).
        trust_remote_code: run modelling code from the model directory.
        **extra: further arguments of ``from_pretrained``.

    Raises:
        ModelError: the directory is unusable, or its tensors do not match its configuration.
    """
    model, _ = load_pretrained(
        AutoModelForCausalLM,
        path,
        dtype=dtype,
        device=device,
        attention=attention,
        trust_remote_code=trust_remote_code,
        **extra,
    )
    return model


def load_pretrained(
    auto_class: Any,
    path: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    attention: str,
    may_be_missing: tuple[str, ...] = (),
    **extra: Any,
) -> tuple[PreTrainedModel, frozenset[str]]:
    """Call ``auto_class.from_pretrained``; refuse missing or misshapen tensors, of which transformers only warns.

    Args:
        auto_class: an ``AutoModelFor...`` class.
        path: model directory or hub id.
        dtype: dtype of the parameters.
        device: device of the parameters.
        attention: see ``load_causal_lm``.
        may_be_missing: names that the checkpoint may lack (a new head).
        **extra: further arguments of ``from_pretrained``.

    Returns:
        The model in evaluation mode, and the names of ``may_be_missing`` that the checkpoint lacks.

    Raises:
        ModelError: see ``load_causal_lm``.
    """
    directory = Path(path).expanduser()
    is_directory = check_model_directory(path) is not None
    try:
        with no_progress_bars():
            model, report = auto_class.from_pretrained(
                str(directory) if is_directory else path,
                dtype=dtype,
                attn_implementation=attention_implementation(attention),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with names
                **extra,
            )
    except pickle.UnpicklingError as error:  # its own text advises to execute the file
        raise ModelError(
            f"cannot load the model in {path}: its weights are not safetensors, and a file is damaged or contains more"
            " than tensors; nothing in it was executed. Use a model that is saved as safetensors."
        ) from error
    except Exception as error:  # an invalid shape or size may raise anything, wherever it is first used
        raise not_loadable("model", path, error) from error
    missing = sorted(set(report["missing_keys"]) - set(may_be_missing))
    misshapen = sorted(str(entry) for entry in report["mismatched_keys"])
    if missing or misshapen:
        raise wrong_weights(path, missing, misshapen)
    return model.to(device).eval(), frozenset(report["missing_keys"])


def wrong_weights(path: str, missing: list[str], misshapen: list[str]) -> ModelError:
    """Return the error for weights that do not match the configuration."""
    parts = [f"missing {_first(missing)}"] if missing else []
    parts += [f"with a wrong shape {_first(misshapen)}"] if misshapen else []
    return ModelError(
        f"the weights of {path} do not match its {CONFIG_FILE}: {'; '.join(parts)}."
        " Was the configuration edited, or the model saved incompletely? Export it again."
    )


def max_length(config: Any) -> int | None:
    """Return the longest sequence of the model in tokens; None if its configuration does not state it.

    Raises:
        ModelError: the value is not a length.
    """
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if length is not None and (not isinstance(length, int) or length < 1):
        raise ModelError(
            f"the model's configuration has max_position_embeddings {length!r}, which is not a positive integer"
        )
    return length


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerBase, config: Any, model: str) -> None:
    """Refuse a tokenizer that can produce ids for which the model has no embedding.

    Args:
        tokenizer: the tokenizer.
        config: the model's configuration, as an object or the content of ``config.json``.
        model: path, for the message.

    Raises:
        ModelError: names the largest id and the vocabulary size.
    """
    if isinstance(config, dict):
        text_config = config.get("text_config")
        vocab_size = config.get("vocab_size") or (
            text_config.get("vocab_size") if isinstance(text_config, dict) else None
        )
    else:
        vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    if vocab_size is not None and (not isinstance(vocab_size, int) or vocab_size < 1):
        raise ModelError(
            f"the configuration of the model {model!r} has vocab_size {vocab_size!r}, not a positive integer"
        )
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if vocab_size is not None and largest >= vocab_size:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} does not belong to the model {model!r}: its largest token id is"
            f" {largest}, but the model's vocabulary has {vocab_size} entries. Use the tokenizer saved with the model."
        )


def hub_snapshot(path: str) -> Path | None:
    """The directory of the hub's cache with the files of the commit that a hub id names now. None if weights, which
    loading would download, are missing there, or if ``path`` is a directory.

    Raises:
        ModelError: the hub refuses the configuration, or there is no network and none in its cache.
    """
    if Path(path).expanduser().is_dir():
        return None
    try:
        directory = Path(hf_hub_download(path, CONFIG_FILE)).parent
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise not_loadable("model", path, error) from error
    try:
        weight_files(directory)
    except ModelError:
        return None
    return directory


def _could_be_hub_id(path: str) -> bool:
    """Whether ``path`` may be a hub id: ``owner/name``, unlike any file path."""
    parts = path.split("/")
    return len(parts) == 2 and all(parts) and not path.startswith((".", "~")) and os.sep + os.sep not in path


def _num_tensors(file: Path) -> int:
    """Return the number of tensors in a file, from its header."""
    try:
        with safe_open(file, framework="pt") as handle:
            return len(handle.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is truncated or not a safetensors file: {error}. Copy or export it again.") from error


def not_loadable(what: str, path: str, error: Exception) -> ModelError:
    """Return the error for a directory or hub id that transformers or the hub refused."""
    first_line = (str(error).splitlines() or ["no details"])[0].rstrip(".")
    reason = f"{type(error).__name__}: {first_line}."
    if Path(path).expanduser().is_dir():
        return ModelError(f"cannot load the {what} in {path}: {reason}")
    return ModelError(
        f"{path!r} is neither a model directory on this machine nor a hub id that can be reached from here"
        f" ({what}): {reason}"
        " Download the model where there is a network and give its directory."
    )


def _first(names: list[str], count: int = 4) -> str:
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")
