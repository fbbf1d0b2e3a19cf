"""What ``weight_sync.py`` sends: a model of a given size in a trainer's memory, and what copying it costs."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from chatlearn_core.types import WeightShard
from chatlearn_testing.model_directory import read_checkpoint

MB = 1 << 20
FILE_PIECE_BYTES = 4 << 20
VOCABULARY = 32_000
MOST_LAYERS = 28
"""As many as Qwen3-0.6B has; smaller models have fewer."""
HEAD_SIZE = 64
MODEL_LENGTH = 512
LEARNING_RATE = 1e-6
"""As RL runs have it: in bfloat16 most weights do not move in one step."""


def model_config(size_mb: int, dtype: torch.dtype) -> Any:
    """A Llama whose weights have ``size_mb``, give or take a row, and the proportions of one of that size."""
    from transformers import LlamaConfig

    elements = size_mb * MB / dtype.itemsize
    layers = max(1, min(MOST_LAYERS, size_mb // 8))
    # vocabulary x hidden + layers x (4 + 12) x hidden^2 = elements
    root = math.sqrt(VOCABULARY**2 + 64 * layers * elements)
    hidden = HEAD_SIZE * max(1, round((root - VOCABULARY) / (32 * layers) / HEAD_SIZE))
    rest = (elements - VOCABULARY * hidden) / layers - 4 * hidden**2
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=HEAD_SIZE * max(1, round(rest / (3 * hidden) / HEAD_SIZE)),
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=hidden // HEAD_SIZE,
        max_position_embeddings=MODEL_LENGTH,
        tie_word_embeddings=True,
    )


def write_model(directory: Path, size_mb: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Write a model directory with random weights and a tokenizer; returns its tensors by checkpoint name."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = LlamaForCausalLM(model_config(size_mb, dtype)).to(dtype)
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(directory)
    return own_memory(read_checkpoint(directory))


def own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that no file lies behind."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


class MemoryTrainer:
    """Streams tensors out of this process's memory, as one rank does."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def weights(self, export: str = "full_tensors", payload: str = "full") -> Iterator[WeightShard]:
        """See ``Trainer``."""
        for name, tensor in self.tensors.items():
            shape = tuple(tensor.shape)
            yield WeightShard(name, shape, tuple((0, size) for size in shape), 0, tensor)


def memcpy_s(tensors: Mapping[str, Tensor], repeats: int) -> tuple[float, float]:
    """Seconds, and CPU seconds, of copying the same tensors into memory that was touched before."""
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    seconds, cpu = [], []
    for _ in range(repeats + 1):
        start, cpu_start = time.perf_counter(), time.process_time()
        for name, tensor in tensors.items():
            target[name].copy_(tensor)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return statistics.median(seconds[1:]), statistics.median(cpu[1:])


def files_s(tensors: Mapping[str, Tensor], directory: Path, repeats: int) -> tuple[float, float]:
    """Seconds of writing the same tensors into one safetensors file and flushing it to the disk, and then of reading
    every byte of it.
    """
    path, written, read = directory / "plain.safetensors", [], []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        save_file(dict(tensors), path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            written.append(time.perf_counter() - start)
            while file.read(FILE_PIECE_BYTES):
                pass
        read.append(time.perf_counter() - start - written[-1])
        path.unlink()
    return statistics.median(written[1:]), statistics.median(read[1:])


def total_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


def optimizer_step(tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Every tensor after one AdamW step on float32 weights, rounded back to its own dtype."""
    generator = torch.Generator().manual_seed(seed)
    stepped = {}
    for name, tensor in tensors.items():
        weight = torch.nn.Parameter(tensor.float())
        weight.grad = torch.randn(weight.shape, generator=generator)
        torch.optim.AdamW([weight], lr=LEARNING_RATE).step()
        stepped[name] = weight.detach().to(tensor.dtype)
    return stepped
