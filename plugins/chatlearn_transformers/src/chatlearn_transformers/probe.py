"""Compares a model's own computation with that through the cache, on some tokens, before a run starts.

This catches what no list of architectures can: attention that ignores its mask, positions that are not rotary, windows
kept in buffers. The tokens exceed every limit on the reach of attention. For a long limit, only the first layers are
compared, deep enough to include every kind of layer, so that the comparison costs a few layers and at most
``_MOST_TOKENS`` tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from chatlearn_core.exceptions import ModelError
from chatlearn_transformers.architecture import attention_spans, check_architecture
from chatlearn_transformers.decoder import Decoder
from chatlearn_transformers.row_decoder import Ids, RowDecoder
from chatlearn_transformers.sequential_decoder import SequentialDecoder

logger = logging.getLogger(__name__)

_SHORT_SPAN = 64
"""Up to this span the whole model is compared, because that costs little."""
_MOST_TOKENS = 20_000
_NUM_STEPS = 3
_TOLERANCE = 1e-4
_LOW_PRECISION_TOLERANCE = 0.25
"""Allowed root mean square difference as a fraction of the logits' standard deviation. Low precision rounds, and may
route a token to other experts, so then some layers are also compared in float32."""


def start_decoder(model: Any, path: str, *, fused_attention: bool, max_length: int) -> RowDecoder:
    """Return a decoder that computes the same as ``model``: all sequences together, or else one at a time.

    Args:
        model: freshly loaded with ``eager`` attention.
        path: path of the model, for messages.
        fused_attention: whether to replace the model's own attention code.
        max_length: longest sequence that may be requested, tokens.

    Raises:
        ModelError: both decoders differ from the model, or its attention span is too long to check.
    """
    check_architecture(model, path, max_length)
    together: RowDecoder = Decoder(model, fused_attention=fused_attention)
    reason = decoding_problem(together, path, max_length)
    if reason is None:
        return together
    together.release()
    alone: RowDecoder = SequentialDecoder(model, fused_attention=fused_attention)
    other_reason = decoding_problem(alone, path, max_length)
    model_type = model.config.model_type
    if other_reason is not None:
        alone.release()
        raise ModelError(
            f"the generator 'transformers' cannot serve {path} (model type {model_type!r}): sequences together,"
            f" {reason}; one at a time, {other_reason}. Use another generator backend (vllm, sglang)."
        )
    logger.warning(
        "%s (model type %s) is generated from one sequence at a time, which is slow: all sequences together, %s."
        " Another generator backend (vllm, sglang) may be faster",
        path,
        model_type,
        reason,
    )
    return alone


def decoding_problem(decoder: RowDecoder, path: str, max_length: int) -> str | None:
    """Compare a decoder's logits with the model's own.

    Args:
        decoder: decoder of a freshly loaded model; its cache is empty afterwards.
        path: path of the model, for messages.
        max_length: longest sequence that may be requested, tokens.

    Returns:
        The problem, if they differ by more than rounding; otherwise None.

    Raises:
        ModelError: an attention span is too long to check, or the model's own logits are not finite.
    """
    spans = attention_spans(decoder.model.config, max_length)
    if spans and spans[-1] + _overshoot(spans[-1]) > _MOST_TOKENS:
        raise ModelError(
            f"the generator 'transformers' cannot serve {path} (model type {decoder.model.config.model_type!r}): its"
            f" attention reaches {spans[-1]} tokens, and sequences of up to {max_length} may be requested, but spans"
            " beyond"
            f" {_MOST_TOKENS * 8 // 9} tokens are not checked. Set model.max_length to {spans[-1]}, or use another"
            " generator backend (vllm, sglang)."
        )
    try:
        return _check_spans(decoder, spans, path, max_length) or _check_rows(decoder, path, max_length)
    except ModelError:
        raise
    # A model that does not work with the cache may raise anything.
    except Exception as error:
        return f"computing failed with {type(error).__name__}: {error}"
    finally:
        decoder.cache.clear()


def logits_problem(expected: Tensor, found: Tensor) -> str | None:
    """Return by how much logits [T, V] differ from the expected ones; None if only by rounding."""
    allowed = _TOLERANCE if expected.dtype in (torch.float32, torch.float64) else _LOW_PRECISION_TOLERANCE
    spread = float(expected.float().std()) or 1.0
    difference = float((expected.float() - found.float()).square().mean().sqrt()) / spread
    if difference <= allowed:
        return None
    return f"logits differ from the model's own by {difference:.3g} standard deviations; the tolerance is {allowed}"


def _check_rows(decoder: RowDecoder, path: str, max_length: int) -> str | None:
    """Compare sequences of unequal lengths, one of them twice, with all layers and in the model's own precision."""
    longest = min(7, max_length - 1)
    if longest < 2:
        return None
    first = _tokens(decoder, longest + _NUM_STEPS, 11)[:max_length]
    second = _tokens(decoder, 3 + _NUM_STEPS, 29)[:max_length]
    num_steps = min(_NUM_STEPS, max_length - longest)
    return _check_together(decoder, [first, second], [longest, min(3, longest)], [0, 1, 0], num_steps, path)


def _check_spans(decoder: RowDecoder, spans: Sequence[int], path: str, max_length: int) -> str | None:
    """Compare every span, in float32 if possible."""
    is_float32 = decoder.model.dtype == torch.float32
    shallow = not is_float32 or (bool(spans) and spans[-1] > _SHORT_SPAN)
    lengths = spans if spans or is_float32 else [1]
    try:
        with _first_layers(decoder, shallow=shallow, upcast=not is_float32):
            return _first_problem(_check_span(decoder, span, path, max_length) for span in lengths)
    except ModelError:
        raise
    # Expert kernels may support only low precision, and float32 may not fit into memory.
    except Exception:
        if is_float32:
            raise
        decoder.cache.clear()
        with _first_layers(decoder, shallow=shallow, upcast=False):
            return _first_problem(_check_span(decoder, span, path, max_length) for span in lengths)


def _first_problem(problems: Iterable[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _check_span(decoder: RowDecoder, span: int, path: str, max_length: int) -> str | None:
    """Compare a prompt longer than ``span``, and a sequence that exceeds it in decoding."""
    inside = max(1, min(span, max_length - _NUM_STEPS) - 1)
    beyond = max(inside, min(span + _overshoot(span), max_length - _NUM_STEPS))
    tokens = _tokens(decoder, beyond + _NUM_STEPS, 11)
    sequences = [tokens, tokens[: inside + _NUM_STEPS]]
    return _check_together(decoder, sequences, [beyond, inside], [0, 1], _NUM_STEPS, path)


def _check_together(
    decoder: RowDecoder,
    sequences: Sequence[Ids],
    splits: Sequence[int],
    sources: Sequence[int],
    num_steps: int,
    path: str,
) -> str | None:
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
    if not bool(torch.isfinite(expected).all()):
        raise ModelError(f"{path}: the model's logits are not finite on a short probe; its weights are damaged")
    return logits_problem(expected.flatten(0, 1), found.flatten(0, 1))


def _tokens(decoder: RowDecoder, count: int, seed: int) -> Ids:
    """Arbitrary fixed tokens, without a pattern that attention could follow."""
    return np.random.default_rng(seed).integers(decoder.vocab_size, size=count)


def _overshoot(span: int) -> int:
    """Return how many tokens to go beyond a span: enough that attending to them too would change the logits."""
    return max(24, span // 8)


@contextmanager
def _first_layers(decoder: RowDecoder, *, shallow: bool, upcast: bool) -> Iterator[None]:
    """Use only the first layers that include every kind of layer (``shallow``), and compute in float32 (``upcast``)."""
    model = decoder.model
    place = _layers(model) if shallow else None
    if place is not None:
        parent, name = place
        layers: nn.ModuleList = getattr(parent, name)
        setattr(parent, name, nn.ModuleList(list(layers)[: _depth(layers)]))
    try:
        if upcast:
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
    """Find the model's decoder layers: the only list with as many modules as the model has layers."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    return found[0] if len(found) == 1 else None


def _depth(layers: nn.ModuleList) -> int:
    """Return the number of first layers that include every kind of layer."""
    kinds = [_kind(layer) for layer in layers]
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Return a key that is equal for layers with equal settings and buffers, without layer numbers."""
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
