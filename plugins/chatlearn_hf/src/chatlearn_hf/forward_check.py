"""Chooses how to compute a model's sequences, by comparison with the model's own forward pass of each sequence alone.

No configuration says whether sequences may be concatenated in one row: recurrent and convolutional layers carry state
from one to the next, some architectures drop the positions that separate them, others pass no window to their
attention. Before a run starts, this module therefore computes a few short sequences in the requested way and compares
them with the model's own ``forward`` of each. It rejects a way with different results.

Two effects do not show with a few short sequences: what happens beyond a window of thousands of tokens, or beyond the
original context of length-dependent rotary embeddings; and small differences in a model that computes in bfloat16. For
these the comparison is repeated with a stand-in, a tiny float32 model of the same class and settings whose windows and
contexts are a few tokens long (``tiny_architectures.build_stand_in``). If no stand-in can be built, rows are packed
only if the attention layers request the configured window by name.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chatlearn_core.exceptions import ModelError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_hf.model_directory import attention_implementation
from chatlearn_hf.packed_forward import PackedModel, Rows
from chatlearn_hf.sequence_thresholds import Threshold, thresholds
from chatlearn_hf.tiny_architectures import build_stand_in
from chatlearn_hf.token_group import TokenGroup
from chatlearn_hf.varlen_attention import VARLEN_ATTENTION, PackedLayout

logger = logging.getLogger(__name__)

Attention = Literal["varlen", "sdpa", "eager"]
Sequences = Literal["auto", "packed", "padded"]

SHORT = (7, 12, 5)
"""Lengths of the sequences that are always compared, in tokens."""
BEYOND = (9, 4)
"""Number of tokens by which two further sequences exceed the largest threshold."""
COMPARED = 32
"""Number of tokens compared at the end of each sequence; bounds the logits in memory."""
MAX_WORK = {"cpu": 1e11, "cuda": 1e13}
"""Floating-point operations for sequences beyond a threshold, estimated from parameters and tokens: about a second on a
few CPU cores, less on a GPU."""
MAX_LENGTH = 2048
"""Longest such sequence in tokens: the model's own forward holds [heads, L, L] scores."""
TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 0.25
"""Allowed difference as a fraction of the logits' standard deviation. In float32 it bounds every compared token; in
lower precision, where rounding may route single tokens to other experts, it bounds the median token."""


STATEFUL_LAYERS = frozenset({"linear_attention", "mamba", "conv", "recurrent"})
"""Layer types (config.json: layer_types) that carry state from token to token of a row."""
FAILURES = (ModelError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError, AssertionError)
"""Exceptions that a model raises for a request that its architecture does not support."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute the sequences of a batch."""

    attention: Attention
    rows: Rows

    def __str__(self) -> str:
        return f"attention {self.attention}, sequences {self.rows}"


WAYS: dict[Attention, tuple[Way, ...]] = {
    "varlen": (Way("varlen", "packed"), Way("sdpa", "padded"), Way("eager", "padded")),
    "sdpa": (Way("sdpa", "packed"), Way("sdpa", "padded")),
    "eager": (Way("eager", "packed"), Way("eager", "padded")),
}
"""The ways that each ``attention`` option allows, best first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The first correct way, and why the ways before it were rejected."""

    way: Way
    refused: tuple[tuple[Way, str], ...]

    def note(self, model_type: str) -> str | None:
        """Return a sentence for the user if the first way was rejected; otherwise None."""
        if not self.refused:
            return None
        way, reason = self.refused[0]
        return (
            f"model type {model_type!r} is computed with {self.way} instead of {way}, which gives wrong results:"
            f" {reason}. Results equal those of each sequence alone; padding costs time where lengths differ."
        )


def with_attention(attention: Attention, load: Callable[[Attention], PreTrainedModel]) -> PreTrainedModel:
    """Load a model with ``attention`` or, if its architecture lacks that, with another one; call
    ``ForwardCheck.choose`` next.

    Raises:
        ModelError: ``load`` failed for a reason other than the attention.
    """
    refusal: ModelError | None = None
    for name in dict.fromkeys((attention, *get_args(Attention)[1:])):
        try:
            model = load(name)
        except ModelError as error:
            if not _is_about_attention(error):
                raise
            refusal = refusal or error
            continue
        # An architecture with its own attention code accepts any name and ignores it.
        if name != "varlen" or model._can_set_attn_implementation():
            return model
    assert refusal is not None, "eager attention is refused only with an error"
    raise refusal


def loaded_attention(model: PreTrainedModel) -> Attention:
    """Return the model's current attention as an option value."""
    name = model.config._attn_implementation
    options: tuple[Attention, ...] = get_args(Attention)
    found = next((option for option in options if attention_implementation(option) == name), None)
    assert found is not None, f"{name} is no attention that a trainer loads"
    return found


def _is_about_attention(error: ModelError) -> bool:
    cause = error.__cause__
    unknown = isinstance(cause, KeyError) and VARLEN_ATTENTION in str(cause)
    return unknown or (isinstance(cause, ValueError) and "attention implementation" in str(cause))


class ForwardCheck:
    """Compares ways to compute sequences with the model's own forward passes. Collective if the model is sharded.

    Random states, modes and settings are restored.

    Args:
        model: the model with weights, in its state for training.
        device: device of the computation.
        dtype: dtype of the computation.
        autocast: returns a context for every forward pass.
        sharing: ranks that share a row's tokens.
        max_length: longest sequence that the run computes, in tokens; None means no limit.
        agree: reduces a difference over all ranks by maximum.
        num_elements: number of elements of all parameters; None counts them, for which they must be whole.
    """

    def __init__(
        self,
        model: PackedModel,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        sharing: TokenGroup | None = None,
        max_length: int | None = None,
        agree: Callable[[float], float] = float,
        num_elements: int | None = None,
    ) -> None:
        self.model = model
        self.device = torch.device(device)
        self.tolerance = TOLERANCE if dtype in (torch.float32, torch.float64) else LOW_PRECISION_TOLERANCE
        self.autocast = autocast
        self.sharing = sharing
        self.agree = agree
        self.num_elements = num_elements or sum(parameter.numel() for parameter in model.parameters())
        self.thresholds = [
            threshold
            for threshold in thresholds(model.model.config.get_text_config())
            if max_length is None or threshold.tokens < max_length or threshold.counts_row
        ]
        self.config = model.model.config.get_text_config()
        self._loaded = loaded_attention(model.model)
        self._special = {value for name, value in self.config.to_dict().items() if _is_token_id(name, value)} | {0}
        self._tiny: list[ForwardCheck] | None = None
        self._references: dict[tuple[int, int], Tensor] = {}

    # Public methods

    def choose(self, attention: Attention, sequences: Sequences = "auto") -> Choice:
        """Set the model to the first correct way of ``attention``.

        Raises:
            ModelError: no way is correct; the message has the difference of each, and settings that are correct.
        """
        asked = self._asked(attention, sequences)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            refused: list[tuple[Way, str]] = []
            for way in asked:
                reason = self.reason_against(way)
                if reason is None:
                    self._set(way)
                    return Choice(way, tuple(refused))
                refused.append((way, reason))
            raise self._error(attention, sequences, refused)

    def reason_against(self, way: Way) -> str | None:
        """Return why a way is wrong for the model; None if it is correct."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self._structural_reason(way) or self._measured_reason(way)
        finally:
            self.model.train(training)

    # Internal methods

    def _asked(self, attention: Attention, sequences: Sequences) -> list[Way]:
        return [way for way in WAYS[attention] if sequences in ("auto", way.rows)]

    def _structural_reason(self, way: Way) -> str | None:
        model = self.model.model
        if self.sharing is not None and way != Way("varlen", "packed"):
            return "ranks can share only packed rows, with attention varlen"
        if self.sharing is not None and self.model.has_sequence_rope:
            return (
                "its rotary embedding depends on a sequence's length, but a rank that shares rows sees only part of it"
            )
        if not self._can_set(way.attention):
            return f"{type(model).__name__} has no attention {way.attention!r}"
        if way.attention == "sdpa" and getattr(self.config, "attn_logit_softcapping", None) is not None:
            return "attention sdpa drops the soft cap on attention scores (config.json: attn_logit_softcapping)"
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if way.rows == "packed" and (getattr(model, "_is_stateful", False) or kinds & STATEFUL_LAYERS):
            return "its layers carry a state from one sequence of a row to the next"
        selections = [threshold for threshold in self.thresholds if threshold.kind == "selection"]
        if way.rows == "packed" and selections:
            # The selection depends on token values, so equal results for a few sequences prove nothing.
            return f"its sparse attention selects among the tokens of a whole row (config.json: {selections[0].name})"
        return None

    def _measured_reason(self, way: Way) -> str | None:
        near, far = self._split_thresholds()
        cases = [SHORT]
        if near:
            reach = max(threshold.tokens for threshold in near)
            cases.append((reach + BEYOND[0], SHORT[-1], reach + BEYOND[1]))
        windows: set[int] = set()
        for case in cases:
            error = ""
            try:
                difference, seen = self._difference(way, case)
                windows |= seen
            except torch.OutOfMemoryError:
                raise
            except FAILURES as failure:
                first_line = (str(failure).splitlines() or ["no details"])[0]
                difference, error = math.inf, f"{type(failure).__name__}: {first_line.split('. ')[0].rstrip('.')}"
            difference = self.agree(difference)
            if not difference <= self.tolerance:
                beyond = " (beyond its window or original context)" if case is not SHORT else ""
                return error or (
                    f"logits differ from those of each sequence alone by {difference:.2g} standard deviations{beyond};"
                    f" the tolerance is {self.tolerance}"
                )
        if not far and self.tolerance == TOLERANCE:
            return None
        stand_in = self._stand_in()
        if stand_in is not None:
            reason = stand_in.reason_against(way)
            return (
                None if reason is None else f"{reason} (found with a stand-in of the same settings and short windows)"
            )
        return self._unchecked_reason(way, far, windows) if way.rows == "packed" else None

    def _stand_in(self) -> ForwardCheck | None:
        """Return the check of a tiny model with the same settings; None if it cannot be built."""
        if self._tiny is None:
            self._tiny = []
            try:
                tiny = ForwardCheck(PackedModel(build_stand_in(self.model.model), self.model.head))
                with torch.no_grad():
                    tiny._alone(tiny._tokens(SHORT[0], 0), 0)
                self._tiny.append(tiny)
            except FAILURES as error:
                logger.info("No stand-in of model type %s: %s", self.config.model_type, error)
        return self._tiny[0] if self._tiny else None

    def _unchecked_reason(self, way: Way, far: Sequence[Threshold], seen: set[int]) -> str | None:
        """Return a threshold that was not compared and that the layers do not request as a window; None if there is
        none.
        """
        for threshold in far:
            told = way.attention != "varlen" or threshold.tokens in seen
            if threshold.kind == "rope" or (threshold.kind == "window" and told):
                continue
            return (
                f"{threshold.name} {threshold.tokens} (config.json) is too long for a comparison, and its attention"
                " layers do not request it as a sliding window"
            )
        return None

    def _split_thresholds(self) -> tuple[list[Threshold], list[Threshold]]:
        """Split thresholds into those that can be exceeded at a bounded cost, and the others."""
        budget = MAX_WORK.get(self.device.type, MAX_WORK["cpu"])
        longest = min(MAX_LENGTH, budget / (2 * self.num_elements) / 4)  # two such sequences, computed twice
        near: list[Threshold] = []
        far: list[Threshold] = []
        for threshold in self.thresholds:
            (near if threshold.tokens + max(BEYOND) <= longest else far).append(threshold)
        return near, far

    def _difference(self, way: Way, lengths: tuple[int, ...]) -> tuple[float, set[int]]:
        """Return the largest difference, in standard deviations of the logits, and the windows that layers
        requested.
        """
        sequences = [self._tokens(length, place) for place, length in enumerate(lengths)]
        expected = [self._alone(tokens, place) for place, tokens in enumerate(sequences)]
        self._set(way)
        layout = PackedLayout(lengths, self.device, self.sharing)
        names = {"lm": ("logprobs", "entropy"), "value": ("values",), "reward": ("scores",)}[self.model.head]
        with self.autocast():
            outputs = self.model(torch.cat(sequences), layout, names)
        spread = max(float(logits.float().std()) for logits in expected) if self.model.head == "lm" else 1.0
        worst = 0.0
        for place, (tokens, reference) in enumerate(zip(sequences, expected, strict=True)):
            stop = sum(lengths[: place + 1])
            rows = slice(place, place + 1) if self.model.head == "reward" else slice(stop - len(reference) + 1, stop)
            found = [outputs[name][rows] for name in names]
            for ours, theirs in zip(found, self._expected_outputs(reference, tokens), strict=True):
                gaps = (ours.float() - theirs).abs()
                gap = gaps.max() if self.tolerance == TOLERANCE else gaps.median()
                gap = gap if bool(torch.isfinite(gaps).all()) else torch.tensor(torch.inf)
                worst = max(worst, float(gap) / max(spread, 1e-3))
        return worst, layout.windows

    def _expected_outputs(self, reference: Tensor, tokens: Tensor) -> list[Tensor]:
        """Return the expected outputs for a sequence, from its own logits after its last tokens."""
        if self.model.head == "reward":
            return [reference[-1:].float()]
        if self.model.head == "value":
            return [reference[:-1].float()]
        distribution = reference[:-1].float().log_softmax(-1)
        labels = tokens[len(tokens) - len(reference) + 1 :]
        return [distribution.gather(-1, labels[:, None]).squeeze(-1), -(distribution.exp() * distribution).sum(-1)]

    def _alone(self, tokens: Tensor, place: int) -> Tensor:
        """Return the logits [C, V] (or scores [C]) after the last tokens of a sequence, by the model's own forward."""
        key = (len(tokens), place)
        if key not in self._references:
            self._set(Way("eager" if self._can_set("eager") else self._loaded, "padded"))
            with self.autocast():
                logits = self.model.alone(tokens, min(len(tokens), COMPARED + 1))
            if not bool(torch.isfinite(logits).all()):
                raise ModelError("the model's own logits are not finite; its weights are damaged")
            self._references[key] = logits
        return self._references[key]

    def _tokens(self, length: int, place: int) -> Tensor:
        """Return arbitrary fixed tokens [L] that are not special to the model."""
        vocabulary = int(self.config.vocab_size)
        ids = ((torch.arange(length) * 7919 + 104729 * (place + 1)) % vocabulary).tolist()
        ordinary = next((i for i in range(vocabulary) if i not in self._special), 0)
        return torch.tensor([ordinary if i in self._special else i for i in ids], device=self.device)

    def _can_set(self, attention: Attention) -> bool:
        model = self.model.model
        if not model._can_set_attn_implementation():  # has its own attention code, chosen at load time
            return attention == self._loaded != "varlen"
        return attention != "sdpa" or bool(model._supports_sdpa)

    def _set(self, way: Way) -> None:
        model = self.model.model
        name = attention_implementation(way.attention)
        if model.config._attn_implementation != name:
            model.set_attn_implementation(name)
        self.model.rows = way.rows

    def _error(self, attention: Attention, sequences: Sequences, refused: list[tuple[Way, str]]) -> ModelError:
        tried = set() if self.sharing is not None else {way for way, _ in refused}
        condition, self.sharing = ("with ulysses 1 and ring 1, " if self.sharing is not None else ""), None
        others = dict.fromkeys(way for ways in WAYS.values() for way in ways if way not in tried)
        right = [str(way) for way in others if self.reason_against(way) is None]
        advice = (
            f"Correct for this model: {condition}{'; '.join(right)}"
            if right
            else "No other combination of attention and sequences is correct either, so it cannot be trained here"
        )
        reasons = "; ".join(f"with {way}: {reason}" for way, reason in refused)
        return ModelError(
            f"model type {self.config.model_type!r} is not computed right with attention {attention!r} and sequences"
            f" {sequences!r}. {reasons}. {advice}."
        )


def choose_forward(
    model: PackedModel,
    source: ModelSource,
    context: RoleContext,
    *,
    attention: Attention,
    sequences: Sequences,
    dtype: torch.dtype,
    autocast: Callable[[], AbstractContextManager[object]],
    sharing: TokenGroup | None,
    agree: Callable[[float], float],
    num_elements: int | None = None,
) -> Choice:
    """Choose how a role computes sequences, by ``ForwardCheck``, and log if it is not the first way.

    Args:
        model: the model; it is left set to the chosen way.
        source: of the model.
        context: of the role.
        attention: attention asked for.
        sequences: rows asked for.
        dtype: dtype of forward passes.
        autocast: context of forward passes.
        sharing: ranks that share a row.
        agree: reduces a number to the largest of all ranks.
        num_elements: see ``ForwardCheck``.

    Raises:
        ModelError: no way that the options allow is correct; the message names the role and the model.
    """
    check = ForwardCheck(
        model,
        device=torch.device(context.device),
        dtype=dtype,
        autocast=autocast,
        sharing=sharing,
        max_length=source.max_length,
        agree=agree,
        num_elements=num_elements,
    )
    try:
        choice = check.choose(attention, sequences)
    except ModelError as error:
        raise ModelError(f"roles.{context.role} ({source.path}): {error}") from error
    note = choice.note(str(model.model.config.model_type))
    if note is not None and context.rank == 0:
        logger.warning("Role %s: %s", context.role, note)
    return choice


def _is_token_id(name: str, value: object) -> bool:
    return name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
