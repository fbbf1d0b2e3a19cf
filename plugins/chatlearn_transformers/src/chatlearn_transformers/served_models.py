"""Checks whether the generator serves a model directory, and whether its results are correct."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.model_directory import load_causal_lm, load_config, max_length
from chatlearn_hf.plain_forward import load_plain_model
from chatlearn_transformers.architecture import attention_spans
from chatlearn_transformers.decoder import Decoder
from chatlearn_transformers.probe import start_decoder
from chatlearn_transformers.row_decoder import Ids, RowDecoder

_TOLERANCE = 1e-4
_NUM_TOKENS = 24
_PROMPTS = (0.1, 0.4, 1.0)
"""Prompt lengths as fractions of the compared tokens. Ascending, because rows finish from the last one on."""


@dataclass(slots=True, frozen=True)
class ServedModel:
    """What the generator does with a model. Example: ``ServedModel("refused", "it has no language-model head")``."""

    status: Literal["right", "refused", "wrong"]
    reason: str = ""
    """Why the model was refused, or how far the results are off."""
    together: bool = True
    """Whether sequences are computed in one batch, or else one at a time."""


def check_served_model(
    directory: str | Path, *, attention: Literal["sdpa", "eager"] = "sdpa", length: int | None = None
) -> ServedModel:
    """Load a small model like the generator, and compare every logprob with a plain forward of each sequence alone.

    The sequences are computed in one batch, from prompts of unequal lengths, and exceed every window.

    Args:
        directory: directory of a model small enough to be computed several times; needs no tokenizer.
        attention: the generator's option.
        length: ``model.max_length``; None takes the configuration's.
    """
    lengths = [n for n in (length, max_length(load_config(str(directory)))) if n is not None]
    longest = min(lengths, default=2**31)
    try:
        model = load_causal_lm(str(directory), attention="eager").requires_grad_(False)
        decoder = start_decoder(model, str(directory), fused_attention=attention == "sdpa", max_length=longest)
    except ModelError as error:
        return ServedModel("refused", str(error))
    together = isinstance(decoder, Decoder)
    spans = attention_spans(model.config, longest)
    num_tokens = min(longest, max(_NUM_TOKENS, 2 * spans[-1] if spans else 0))
    difference = _largest_difference(decoder, directory, num_tokens)
    if not difference <= _TOLERANCE:
        return ServedModel("wrong", f"logprobs differ by {difference:.3g} from a plain forward's", together)
    return ServedModel("right", together=together)


def _largest_difference(decoder: RowDecoder, directory: str | Path, num_tokens: int) -> float:
    """Return the largest logprob difference over three sequences of ``num_tokens`` random tokens."""
    draw = np.random.default_rng(0)
    size = min(decoder.vocab_size, 200)
    sequences: list[Ids] = [draw.integers(min(3, size - 1), size, num_tokens) for _ in _PROMPTS]
    splits = [max(1, min(num_tokens - 1, round(share * num_tokens))) for share in _PROMPTS]
    plain = load_plain_model(Path(directory))
    with torch.no_grad():
        own = [plain(torch.from_numpy(ids)).log_softmax(-1) for ids in sequences]
    found = decoder.prefill(
        [ids[:split] for ids, split in zip(sequences, splits, strict=True)], np.arange(len(sequences)), 0
    )
    lengths = np.array(splits)
    largest = 0.0
    while True:
        difference = [float((found[i].log_softmax(-1) - own[i][n - 1]).abs().max()) for i, n in enumerate(lengths)]
        largest = max(largest, *difference)
        lengths = lengths[lengths < num_tokens]
        if not lengths.size:
            return largest
        found = decoder.decode(np.array([sequences[row][length] for row, length in enumerate(lengths)]), lengths)
        lengths = lengths + 1
