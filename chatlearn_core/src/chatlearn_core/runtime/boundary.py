"""Checks plugins' return values where the core receives them, so that values that break a rule are never trained on.

A message names role, plugin, sample and rule. For references only shape and type are checked here: the process that
hosts the backend checks their values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from chatlearn_core.exceptions import ContractError
from chatlearn_core.types import (
    KEPT_IDS,
    Completion,
    FinishReason,
    Floats,
    GenerateRequest,
    LogprobBasis,
    Metric,
    RewardResult,
    Sample,
    SamplingParams,
    VersionSpan,
)
from chatlearn_core.types.array_ref import ArrayRef, TextRef
from chatlearn_core.types.metric import Reducer

LOGPROB_TOLERANCE = 1e-3
"""Amount by which rounding may put a logprob above 0, nats: half-precision logits of an almost certain token."""
MAX_REWARD = 1e12
"""Maximum absolute value of a reward and its parts, so that losses and squared gradients stay finite in float32."""
_FINISH_REASONS = get_args(FinishReason)
_REDUCERS = get_args(Reducer)
_SAMPLING = tuple(field.name for field in fields(SamplingParams))
_ID_NAMES = frozenset({"token_ids", "prompt_ids"})
"""Arrays of a completion that are vocabulary ids; the others are logprobs."""
_WRITTEN_NAMES = frozenset(
    {"advantages", "loss_weight", "policy_version", "generator_logprobs", "generator_raw_logprobs"}
)
"""Names in ``token_data`` that the core and algorithms write, in addition to those of flow calls."""


@dataclass(slots=True, frozen=True)
class Origin:
    """The role and plugin whose values are checked."""

    role: str
    plugin: str
    """Kind and name: ``generator 'vllm'``."""
    vocab_size: int | None = None
    """Token ids are smaller; None: unknown."""

    def __str__(self) -> str:
        return f"role {self.role!r}, {self.plugin}"


def check_completion(completion: Any, request: GenerateRequest, origin: Origin) -> None:
    """Check a generator's answer to one request.

    Raises:
        ContractError: it does not satisfy the description of ``types.Completion``.
    """
    try:
        problem = _completion_problem(completion, request, origin.vocab_size)
    except Exception as error:  # objects of the generator's own classes may raise when compared
        problem = f"it cannot be read: {said(error)}"
    if problem is not None:
        raise ContractError(
            f"{origin}: the completion of sample {request.id!r} breaks the contract: {problem}. It is not trained on"
        )


def _completion_problem(completion: Any, request: GenerateRequest, vocab_size: int | None) -> str | None:
    if not isinstance(completion, Completion):
        return f"a {type(completion).__name__} was returned, not a Completion"
    if completion.request_id != request.id:
        return f"request_id is {completion.request_id!r}"
    for name, value, kind in (
        ("sampling", completion.sampling, SamplingParams),
        ("version_spans", completion.version_spans, Sequence),
        ("token_data", completion.token_data, Mapping),
        ("prompt_token_data", completion.prompt_token_data, Mapping),
    ):
        if not isinstance(value, kind):
            return f"{name} is a {type(value).__name__}, not a {kind.__name__}"
    if request.classify and (problem := _score_problem(completion)):
        return problem
    forced, tokens = request.forced_ids, completion.token_ids
    if forced is not None and not isinstance(tokens, ArrayRef) and not np.array_equal(tokens, forced):
        return f"its tokens are not the {len(forced)} that it had to score"
    if completion.sampling.basis != request.sampling.basis:
        return f"it was sampled from {completion.sampling.basis}, and {request.sampling.basis} was asked for"
    if completion.sampling != request.sampling:
        names = [name for name in _SAMPLING if getattr(completion.sampling, name) != getattr(request.sampling, name)]
        told = ", ".join(f"{name}={getattr(completion.sampling, name)!r:.80}" for name in names)
        return f"its sampling parameters have {told}, which is not what was asked for"
    if request.sampling.max_kept_ids and (problem := _kept_ids_problem(completion, request.sampling.max_kept_ids)):
        return problem
    arrays: dict[str, Any] = {"token_ids": completion.token_ids, "logprobs": completion.logprobs}
    if completion.raw_logprobs is not None:
        arrays["raw_logprobs"] = completion.raw_logprobs
    if completion.prompt_ids is not None:
        arrays["prompt_ids"] = completion.prompt_ids
    for name, values in arrays.items():
        kinds, what = ("iu", "integers") if name in _ID_NAMES else ("f", "floating-point numbers")
        if not isinstance(values, np.ndarray | ArrayRef):
            return f"{name} is a {type(values).__name__}, not an array"
        if values.ndim != 1 or values.dtype.kind not in kinds:
            return f"{name} has shape {values.shape} and dtype {values.dtype}; it is one dimension of {what}"
    length = len(completion.token_ids)
    problem = _token_data_problem(completion.token_data) or _prompt_data_problem(completion, request)
    if problem is not None:
        return problem
    for name, values in (arrays | _data_of(completion)).items():
        if name != "prompt_ids" and len(values) != length:
            return f"{name} has {len(values)} entries for {length} tokens"
    cached = completion.num_cached_tokens
    if not isinstance(cached, int) or isinstance(cached, bool) or cached < 0:
        return f"num_cached_tokens is {cached!r:.80}; it is a number of tokens, 0 if it is not known"
    if not isinstance(completion.basis, LogprobBasis):
        return f"basis is a {type(completion.basis).__name__}, not a LogprobBasis"
    if not isinstance(completion.text, str | TextRef):
        return f"text is a {type(completion.text).__name__}"
    return (
        _length_problem(completion, request, length)
        or _spans_problem(completion.version_spans, length)
        or _values_problem(arrays, vocab_size)
        or _infinite_data_problem(_data_of(completion))
        or _resumed_problem(completion, request.resume_from)
    )


def _data_of(completion: Completion) -> dict[str, Any]:
    return {f"token_data {name!r}": values for name, values in completion.token_data.items()}


def _kept_ids_problem(completion: Completion, most: int) -> str | None:
    """The problem with the ids that the tokens were sampled from, or None; trainers check the ids themselves."""
    kept = completion.token_data.get(KEPT_IDS)
    if kept is None:
        return f"token_data has no {KEPT_IDS!r}, the ids that tokens were sampled from, and max_kept_ids is {most}"
    if not isinstance(kept, np.ndarray | ArrayRef) or kept.shape[1:] != (most,) or kept.dtype.kind != "i":
        found = f"shape {kept.shape} and dtype {kept.dtype}" if isinstance(kept, np.ndarray | ArrayRef) else repr(kept)
        return f"token_data {KEPT_IDS!r} has {found:.80}; it is [{len(completion.token_ids)}, {most}] signed integers"
    return None


def _token_data_problem(token_data: Mapping[Any, Any]) -> str | None:
    """The problem with names and types, or None; a sample combines this data with what core and algorithm write."""
    for name, values in token_data.items():
        if not isinstance(name, str):
            return f"token_data has the name {name!r:.80}, which is no text"
        if name in _WRITTEN_NAMES:
            return f"token_data has {name!r}, a name that the core writes itself; choose another"
        if not isinstance(values, np.ndarray | ArrayRef):
            return f"token_data {name!r} is a {type(values).__name__}, not an array"
        if not values.shape:
            return f"token_data {name!r} has shape (); its first dimension is the tokens"
        if values.dtype.kind not in "biuf":
            return f"token_data {name!r} has dtype {values.dtype}; it is numbers or booleans"
    return None


def _prompt_data_problem(completion: Completion, request: GenerateRequest) -> str | None:
    """The problem with the prompt tokens' data, which is joined with the completion's, or None."""
    prompt_ids = request.prompt_ids if completion.prompt_ids is None else completion.prompt_ids
    if not len(prompt_ids):
        return "prompt_ids is empty"
    for name, values in completion.prompt_token_data.items():
        own = completion.token_data.get(name)
        if own is None:
            return f"prompt_token_data has {name!r}, which token_data has not"
        if not isinstance(values, np.ndarray | ArrayRef):
            return f"prompt_token_data {name!r} is a {type(values).__name__}, not an array"
        if len(values) != len(prompt_ids) or values.shape[1:] != own.shape[1:] or values.dtype != own.dtype:
            return (
                f"prompt_token_data {name!r} has shape {values.shape} and dtype {values.dtype} for {len(prompt_ids)} "
                f"prompt tokens, and in token_data rows have shape {own.shape[1:]} and dtype {own.dtype}"
            )
    return None


def _infinite_data_problem(arrays: Mapping[str, Any]) -> str | None:
    for name, values in arrays.items():
        if isinstance(values, ArrayRef) or values.dtype.kind != "f" or not values.size:
            continue
        if not (math.isfinite(values.min()) and math.isfinite(values.max())):  # NaN propagates to both
            wrong = ~np.isfinite(values)
            at = int(wrong.reshape(len(values), -1).any(axis=1).argmax())
            return f"{name} of token {at} is {float(values[at][wrong[at]].flat[0])}; it must be finite"
    return None


def _score_problem(completion: Completion) -> str | None:
    score = completion.score
    if completion.finish_reason == "abort" and score is None:
        return None
    if not isinstance(score, int | float) or isinstance(score, bool) or not math.isfinite(score):
        return f"score is {score!r:.80}; the answer to a request that classifies is a finite number"
    if len(completion.token_ids):
        return f"it has {len(completion.token_ids)} tokens; a request that classifies samples none"
    return None


def _length_problem(completion: Completion, request: GenerateRequest, length: int) -> str | None:
    most, reason = request.sampling.max_tokens, completion.finish_reason
    if reason not in _FINISH_REASONS:
        return f"finish_reason is {reason!r}; it is one of {', '.join(_FINISH_REASONS)}"
    if length > most:
        return f"it has {length} tokens, more than max_tokens={most}"
    if reason == "length" and length < most:
        return f"finish_reason is 'length' after {length} tokens, and max_tokens is {most}"
    if request.classify:
        return None
    if reason == "stop" and not length:
        return "finish_reason is 'stop' without a token: what stops a completion is one of its tokens"
    sampling = request.sampling
    stoppable = not sampling.ignore_eos or sampling.stop or sampling.stop_token_ids or request.forced_ids is not None
    if reason == "stop" and not stoppable:
        return "finish_reason is 'stop' under ignore_eos, without a stop string or id: nothing could stop it"
    return None


def _spans_problem(spans: Any, length: int) -> str | None:
    at = 0
    for span in spans:
        if not isinstance(span, VersionSpan):
            break
        numbers = (span.start, span.stop, span.version)
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            return f"version_spans has {numbers!r:.80}; start, stop and version are integers"
        if span.start != at or span.stop <= span.start or span.version < 0:
            break
        at = span.stop
    else:
        if at == length:
            return None
    told = [(span.start, span.stop, span.version) if isinstance(span, VersionSpan) else span for span in spans]
    return f"version_spans are {told}; they cover the {length} tokens in order, without gaps"


def _values_problem(arrays: Mapping[str, Any], vocab_size: int | None) -> str | None:
    for name, values in arrays.items():
        if isinstance(values, ArrayRef) or not len(values):
            continue
        least, most = values.min(), values.max()
        if name in _ID_NAMES:
            if least < 0 or (vocab_size is not None and most >= vocab_size):
                at = int(values.argmin() if least < 0 else values.argmax())
                where = "token" if name == "token_ids" else "prompt token"
                return f"{where} {at} has id {int(values[at])}, outside the vocabulary of {vocab_size}"
        elif not (math.isfinite(least) and most <= LOGPROB_TOLERANCE):  # NaN and +inf fail the second
            at = int(np.flatnonzero(~np.isfinite(values) | (values > LOGPROB_TOLERANCE))[0])
            return f"{name} of token {at} is {float(values[at])}; a logprob is finite and at most 0"
    return None


def _resumed_problem(completion: Completion, prior: Completion | None) -> str | None:
    if prior is None or any(isinstance(c.token_ids, ArrayRef) for c in (completion, prior)):
        return None
    if np.array_equal(completion.token_ids[: len(prior.token_ids)], prior.token_ids):
        return None
    return f"it does not begin with the {len(prior.token_ids)} tokens that it resumes"


def checked_rewards(results: Any, samples: Sequence[Sample]) -> list[RewardResult] | str:
    """A reward's results as plain numbers, each invalid one replaced by an error; or a text if the results as a whole
    are invalid.
    """
    if not isinstance(results, list | tuple):
        return f"returned a {type(results).__name__}, not a list of RewardResult"
    if len(results) != len(samples):
        return f"returned {len(results)} results for {len(samples)} samples"
    return [_verdict(result, sample) for result, sample in zip(results, samples, strict=True)]


def _verdict(result: Any, sample: Sample) -> RewardResult:
    """The checked result; objects of the reward's own classes may raise when accessed."""
    try:
        return checked_reward(result, sample)
    except Exception as error:
        return RewardResult(None, error=f"what it returned cannot be read: {said(error)}")


def checked_reward(result: Any, sample: Sample, value_name: str = "the reward") -> RewardResult:
    """The result as plain numbers (NumPy and torch scalars cannot be written as JSON), or an error in its place if it
    breaks a rule.
    """
    if not isinstance(result, RewardResult):
        return RewardResult(None, error=f"returned a {type(result).__name__} ({result!r:.80}), not a RewardResult")
    if result.error is not None:
        return RewardResult(None, error=str(result.error))
    if not isinstance(result.components, Mapping):
        return RewardResult(None, error=f"components is a {type(result.components).__name__}, not a mapping of numbers")
    numbers: dict[str, Any] = {value_name: result.value} | {
        f"component {name!r}": x for name, x in result.components.items()
    }
    for what, number in numbers.items():
        if not _is_finite(number):
            return RewardResult(None, error=f"{what} is {number!r:.80}, not a finite number")
        if abs(number) > MAX_REWARD:
            return RewardResult(None, error=f"{what} is {float(number):g}; it must lie within ±{MAX_REWARD:g}")
    tokens = result.token_values
    if tokens is not None:
        try:
            tokens = np.asarray(tokens, dtype=np.float32)
        except (TypeError, ValueError) as error:
            return RewardResult(None, error=f"token_values is not an array of numbers: {error}")
        shape, expected = tokens.shape, (sample.num_completion_tokens,)
        if shape != expected:
            return RewardResult(None, error=f"token_values has shape {shape} for {expected[0]} completion tokens")
        if not np.isfinite(tokens).all():
            return RewardResult(None, error="token_values holds a number that is not finite")
        if np.abs(tokens).max(initial=0.0) > MAX_REWARD:
            return RewardResult(None, error=f"token_values holds a number that is not within ±{MAX_REWARD:g}")
    ends = result.step_ends
    if ends is not None:
        ends = np.asarray(ends)
        if problem := _step_problem(ends, tokens):
            return RewardResult(None, error=problem)
        ends = ends.astype(np.int64)
    assert result.value is not None, "a result without an error has a value"
    components = {str(name): float(number) for name, number in result.components.items()}
    if result.answer is not None and not isinstance(result.answer, str):
        return RewardResult(None, error=f"answer is a {type(result.answer).__name__}, neither text nor None")
    return RewardResult(float(result.value), components, tokens, answer=result.answer, step_ends=ends)


def _step_problem(ends: npt.NDArray[Any], tokens: Floats | None) -> str | None:
    """Why these are no ends of steps of a completion with the values ``tokens``; None if they are."""
    if tokens is None:
        return "step_ends marks tokens, and token_values, which holds the steps' rewards there, is None"
    if ends.ndim != 1 or (ends.size and ends.dtype.kind not in "iu"):
        return f"step_ends is an array of {ends.dtype} of shape {ends.shape}, not of positions, [K]"
    if ends.size and (ends.min() < 0 or ends.max() >= len(tokens) or (np.diff(ends.astype(np.int64)) <= 0).any()):
        return f"step_ends must ascend within the {len(tokens)} tokens of the completion; it is {ends.tolist()!r:.80}"
    others = np.ones(len(tokens), np.bool_)
    others[ends.astype(np.int64)] = False
    if np.any(tokens[others]):
        first = int(np.flatnonzero(others & (tokens != 0))[0])
        return f"token_values is {tokens[first]:g} at token {first}, which step_ends does not have: set it to 0 there"
    return None


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # not a number, several, or beyond float64
        return False


def said(error: BaseException) -> str:
    """Type and message of an error; the message of a custom class may itself raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as second:
        return f"{type(error).__name__} (its message cannot be shown: {type(second).__name__})"


def check_update(metrics: Any, origin: Origin) -> None:
    """Check the metrics that a trainer returns from one update.

    Raises:
        ContractError: they are not named metrics of finite numbers, or ``loss`` is missing. An update whose loss,
            gradient norm or learning rate is not finite should have been refused, with the weights unchanged.
    """
    if not isinstance(metrics, Mapping) or not all(isinstance(metric, Metric) for metric in metrics.values()):
        told = type(metrics).__name__ if not isinstance(metrics, Mapping) else some(sorted(map(str, metrics)))
        raise ContractError(f"{origin}: update returned {told}, not a mapping from names to Metric")
    for name, metric in metrics.items():
        if problem := metric_problem(name, metric):
            raise ContractError(f"{origin}: update reported {problem}")
    if "loss" not in metrics:
        raise ContractError(
            f"{origin}: update reported no 'loss', only {', '.join(sorted(metrics)) or 'nothing'}; every "
            "update reports it"
        )


def metric_problem(name: Any, metric: Metric) -> str | None:
    """The problem with a metric's name or numbers, or None."""
    if not isinstance(name, str):
        return f"a metric with the name {name!r:.80}, which is no text"
    for what, number in (("", metric.total), ("the count of ", metric.count)):
        if not isinstance(number, Real) or isinstance(number, bool):
            return f"{what}{name} = {number!r:.80}, which is no number"
    if name in ("loss", "grad_norm", "lr") and not _is_finite(metric.total):
        return (
            f"{name} = {metric.total}; an update that is not finite is refused by the trainer, with the weights "
            "unchanged. Go back to the last checkpoint"
        )
    if not _is_finite(metric.total):
        return f"{name} = {metric.total}; a metric is finite"
    if metric.reducer not in _REDUCERS:
        return f"{name} with the reducer {metric.reducer!r:.80}; it is one of {', '.join(_REDUCERS)}"
    if (
        not _is_finite(metric.count)
        or metric.count < 0
        or (metric.reducer == "mean" and metric.total and not metric.count)
    ):
        return f"{name} as the mean of {metric.total} over {metric.count}"
    return None


def some(names: Sequence[str], most: int = 3) -> str:
    """The first of many names, and the number of the others."""
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
