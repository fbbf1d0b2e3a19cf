"""Computing some tokens as a model does by itself and through the cache, and comparing: before a run starts.

It catches what no list of architectures can: attention that ignores its mask, positions that are not rotary, windows
kept in buffers. The tokens reach beyond every number of tokens at which attention may stop to look further back; a
model with a long one is compared at the depth at which every kind of layer has come, so that the cost is that of a few
layers and no more than ``_MOST_TOKENS`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from chatlearn_core.exceptions import ChatLearnError, ModelError
from chatlearn_transformers.architecture import attention_spans
from chatlearn_transformers.decoder import Decoder, Ids

_SHORT_SPAN = 64
"""Up to here a span costs little, so the whole model is compared."""
_MOST_TOKENS = 20_000
_NUM_STEPS = 3
_TOLERANCE = 1e-4
_LOW_PRECISION_TOLERANCE = 0.25
"""Root mean square difference allowed, as a share of the logits' spread. Low precision rounds, and may route a token
to other experts, so in low precision some layers are compared in float32 as well."""


def check_decoder(decoder: Decoder, path: str, max_length: int) -> None:
    """Compare the decoder's logits with the model's own.

    Args:
        decoder: of a freshly loaded model; its cache is empty afterwards.
        path: of the model, for messages.
        max_length: longest sequence that will be asked for, tokens.

    Raises:
        ModelError: they differ by more than rounding, or a span of attention is too long to be looked at.
    """
    model_type = decoder.model.config.model_type
    spans = attention_spans(decoder.model.config, max_length)
    if spans and spans[-1] + _overshoot(spans[-1]) > _MOST_TOKENS:
        raise ModelError(
            f"the generator 'transformers' cannot serve {path} (model type {model_type!r}): its attention reaches"
            f" {spans[-1]} tokens, and sequences of up to {max_length} may be asked for; beyond"
            f" {_MOST_TOKENS * 8 // 9} tokens that is not checked. Set model.max_length to {spans[-1]}, or use another"
            " generator backend (vllm, sglang)."
        )
    try:
        if spans or decoder.model.dtype != torch.float32:
            with _shallow_float32(decoder, always=bool(spans) and spans[-1] > _SHORT_SPAN):
                for span in spans or [1]:
                    _check_span(decoder, span, path, max_length)
        _check_rows(decoder, path, max_length)
    except ChatLearnError:
        raise
    # A model that the cache does not fit may raise anything.
    except Exception as error:
        raise ModelError(
            f"the generator 'transformers' cannot serve {path} (model type {model_type!r}): computing through its cache"
            f" failed with {type(error).__name__}: {error}. Use another generator backend (vllm, sglang)."
        ) from error
    finally:
        decoder.cache.clear()


def compare_logits(expected: Tensor, found: Tensor, path: str, model_type: str) -> None:
    """Refuse what differs by more than rounding.

    Args:
        expected: [T, V] the model's own.
        found: [T, V] through the cache.
        path: for the message.
        model_type: for the message.

    Raises:
        ModelError: they differ, or are not finite.
    """
    if not bool(torch.isfinite(expected).all()):
        raise ModelError(f"{path}: the model's logits are not finite on a short probe; its weights are damaged")
    allowed = _TOLERANCE if expected.dtype in (torch.float32, torch.float64) else _LOW_PRECISION_TOLERANCE
    spread = float(expected.float().std()) or 1.0
    difference = float((expected.float() - found.float()).square().mean().sqrt()) / spread
    if not difference <= allowed:
        raise ModelError(
            f"the generator 'transformers' cannot serve {path} (model type {model_type!r}): computed through its"
            f" cache, logits differ from the model's own by {difference:.3g} of their spread, {allowed} is allowed. Use"
            " another generator backend (vllm, sglang)."
        )


def _check_rows(decoder: Decoder, path: str, max_length: int) -> None:
    """Sequences of unequal lengths, one of them twice, at the model's full depth and in its own precision."""
    longest = min(7, max_length - 1)
    if longest < 2:
        return
    first = _tokens(decoder, longest + _NUM_STEPS, 11)[:max_length]
    second = _tokens(decoder, 3 + _NUM_STEPS, 29)[:max_length]
    num_steps = min(_NUM_STEPS, max_length - longest)
    _check_together(decoder, [first, second], [longest, min(3, longest)], [0, 1, 0], num_steps, path)


def _check_span(decoder: Decoder, span: int, path: str, max_length: int) -> None:
    """A prompt longer than ``span``, and one that passes it while decoding."""
    inside = max(1, min(span, max_length - _NUM_STEPS) - 1)
    beyond = max(inside, min(span + _overshoot(span), max_length - _NUM_STEPS))
    tokens = _tokens(decoder, beyond + _NUM_STEPS, 11)
    _check_together(decoder, [tokens, tokens[: inside + _NUM_STEPS]], [beyond, inside], [0, 1], _NUM_STEPS, path)


def _check_together(
    decoder: Decoder, sequences: Sequence[Ids], splits: Sequence[int], sources: Sequence[int], num_steps: int, path: str
) -> None:
    """Compare each sequence's tokens from the last of its prompt on: prompts in one batch, then step by step."""
    prompts = [ids[:split] for ids, split in zip(sequences, splits, strict=True)]
    steps = [decoder.prefill(prompts, np.array(sources), 0)]
    for step in range(num_steps):
        lengths = np.array([splits[source] + step for source in sources])
        tokens = np.array([sequences[source][splits[source] + step] for source in sources])
        steps.append(decoder.decode(tokens, lengths))
    found = torch.stack(steps, dim=1)
    decoder.cache.clear()
    own = [
        decoder.own_logits(ids[: split + num_steps], split - 1) for ids, split in zip(sequences, splits, strict=True)
    ]
    expected = torch.stack([own[source] for source in sources])
    compare_logits(expected.flatten(0, 1), found.flatten(0, 1), path, decoder.model.config.model_type)


def _tokens(decoder: Decoder, count: int, start: int) -> Ids:
    """Arbitrary fixed tokens."""
    return (np.arange(count, dtype=np.int64) * 7919 + start) % decoder.vocab_size


def _overshoot(span: int) -> int:
    """Tokens to go beyond a span by: so many that attending to them as well would show."""
    return max(8, span // 8)


@contextmanager
def _shallow_float32(decoder: Decoder, *, always: bool) -> Iterator[None]:
    """The first layers only, up to which each kind of layer has come, in float32; ``always``: also in a model that is
    float32 anyway.
    """
    model = decoder.model
    is_float32 = model.dtype == torch.float32
    place = _layers(model) if always or not is_float32 else None
    if place is not None:
        parent, name = place
        layers: nn.ModuleList = getattr(parent, name)
        setattr(parent, name, nn.ModuleList(list(layers)[: _depth(layers)]))
    try:
        if not is_float32:
            values = {
                key: tensor.float()
                for key, tensor in (*model.named_parameters(), *model.named_buffers())
                if tensor.dtype in (torch.float16, torch.bfloat16)
            }
            decoder.run = lambda **arguments: functional_call(model, values, kwargs=arguments)
        yield
    finally:
        decoder.run = model
        if place is not None:
            setattr(parent, name, layers)


def _layers(model: Any) -> tuple[nn.Module, str] | None:
    """Where the model keeps its decoder layers: the one list of as many modules as it has layers."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    return found[0] if len(found) == 1 else None


def _depth(layers: nn.ModuleList) -> int:
    """The number of layers, from the first, up to which each kind has come."""
    kinds = [_kind(layer) for layer in layers]
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Equal for layers that compute the same function of their weights: settings and buffers, but no layer numbers."""
    settings = []
    for name, module in layer.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None) and "layer" not in key and "idx" not in key
        }
        buffers = [(key, tuple(value.shape), float(value.sum())) for key, value in module.named_buffers(recurse=False)]
        settings.append((name, type(module).__name__, tuple(sorted(plain.items(), key=str)), tuple(buffers)))
    return tuple(settings)
