"""Implementations of flow calls: one function per method, named by the method's record."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ContractError, RoleLostError
from chatlearn_core.executor.scheduler import FlowCall
from chatlearn_core.executor.step_samples import RolloutRequest, without_completion
from chatlearn_core.flow import Node
from chatlearn_core.runtime.boundary import checked_rewards
from chatlearn_core.runtime.outputs import check_outputs, row_shape
from chatlearn_core.types import (
    Completion,
    GenerateRequest,
    OutputRequest,
    RewardResult,
    Sample,
    SamplingParams,
    sample_from_completion,
    sample_with_turn,
)
from chatlearn_core.types.array_ref import cut
from chatlearn_core.types.keyed_seed import keyed_seed

ResultT = TypeVar("ResultT")
_NOT_OUTPUTS = ("temperature", "cache", "data_sources")
"""Arguments of calls on trainers that outputs do not take."""


async def generate(call: FlowCall, requests: Sequence[RolloutRequest]) -> None:
    """``generator.generate``: sample a completion for each request."""
    for request in requests:
        found = await _completion(call, request)
        if found is None:
            request.left_out = True
        elif isinstance(found, str):
            request.sample = without_completion(request, found)
        else:
            request.sample = sample_from_completion(
                request.sample_id, request.group_id, request.prompt, found, generator=call.node.role
            )
            if not len(found.token_ids):
                request.sample.exclusion = "empty_completion"


async def extend(call: FlowCall, requests: Sequence[RolloutRequest]) -> None:
    """``generator.extend``: sample a further turn of each sample from its tokens. Results of earlier calls are dropped,
    because they do not cover the new tokens. A sample that cannot be continued is excluded.
    """
    number = sum(node.method.name == call.node.method.name for node in call.graph.nodes[: call.node.index])
    await _together(_extend_one(call, request, number) for request in requests)


async def _extend_one(call: FlowCall, request: RolloutRequest, number: int) -> None:
    """Sample further turn ``number`` (from 0) of one sample."""
    sample = request.filled
    if sample.exclusion is not None:  # generation or its reward failed
        request.dropped = True
        return
    seed = keyed_seed(call.seed, "turn", request.draw.seed_key, request.sample_id, number)
    sampling = replace(sampled_as(call.node.arguments, request.sampling or call.sampling), seed=seed)
    turn = f"{request.sample_id}+{number + 1}"
    asked = GenerateRequest(turn, sample.token_ids, sampling, request.group_id, media=sample.media)
    found = await _completion(call, RolloutRequest(request.sample_id, request.draw, asked))
    if isinstance(found, Completion):
        request.sample = sample_with_turn(sample, found, generator=call.node.role, drop=call.fields)
    else:
        sample.exclusion = found or "generation failed: a further turn cannot continue in a later step"
        request.dropped = True


async def score_tokens(call: FlowCall, requests: Sequence[RolloutRequest]) -> None:
    """``generator.score``: a generator's logprobs of the tokens after each sample's prompt, as ``token_data`` that is 0
    where ``loss_mask`` is False.
    """
    name = call.node.fields[0]
    answers = await _together(_forced(call, request) for request in requests)
    scored = [answer for answer in answers if answer is not None]
    values = await call.runtime.data.aget_completions([found for _, found in scored], {"logprobs"})
    for (sample, _), found in zip(scored, values, strict=True):
        logprobs = np.concatenate([np.zeros(sample.num_prompt_tokens, np.float32), found.logprobs])
        sample.token_data[name] = np.where(sample.loss_mask, logprobs, np.float32(0.0))
    for request, answer in zip(requests, answers, strict=True):
        if answer is None and request.filled.loss_mask.any():  # excluded, but packed with the others by later calls
            request.filled.token_data[name] = np.zeros(len(request.filled.token_ids), np.float32)


async def _forced(call: FlowCall, request: RolloutRequest) -> tuple[Sample, Completion] | None:
    """The sample of a request and the generator's scored completion of its tokens; None if there is nothing to score,
    or if the request failed, which excludes the sample.
    """
    sample = request.filled
    start, length = sample.num_prompt_tokens, sample.num_completion_tokens
    if not length or not sample.loss_mask.any():
        return None
    temperature = call.node.arguments.get("temperature", call.sampling.temperature or 1.0)
    asked = GenerateRequest(
        f"{request.sample_id}?{call.node.index}",
        cut(sample.token_ids, 0, start),
        SamplingParams(max_tokens=length, temperature=temperature),
        request.group_id,
        media=sample.media,
        forced_ids=cut(sample.token_ids, start, len(sample.token_ids)),
    )
    found = await _completion(call, RolloutRequest(request.sample_id, request.draw, asked))
    if isinstance(found, Completion):
        return sample, found
    if sample.exclusion is None:
        sample.exclusion = f"scoring failed: {found or 'it would go on in a later step'}"
    return None


async def _together(requests: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Make requests to a generator concurrently, submitted in order; return their results in order."""
    async with asyncio.TaskGroup() as tasks:
        made = [tasks.create_task(request) for request in requests]
    return [task.result() for task in made]


async def _completion(call: FlowCall, request: RolloutRequest) -> Completion | str | None:
    """The completion, the reason why there is none, or None if it continues after this run of the flow."""
    try:
        completion = await call.source.completion(call.node.role, request)
    except RoleLostError:
        raise
    except BackendTimeoutError as error:
        return f"generation timed out: {error}"
    except BackendError as error:
        return f"generation failed: {error}"
    if completion is None:
        return None
    if completion.finish_reason == "abort":
        return f"generation failed: aborted after {len(completion.token_ids)} tokens, unasked"
    if call.bases is not None:
        call.bases.check(completion)
    taken = sorted(completion.token_data.keys() & call.fields)
    if taken:
        raise ContractError(
            f"{call.origin}: the completion of sample {request.sample_id!r} has the token data {taken[0]!r}, which "
            "a call of the flow writes itself; choose another name"
        )
    return completion


async def judge(call: FlowCall, requests: Sequence[RolloutRequest]) -> None:
    """``reward.score``: score each sample that was generated."""
    judged = [request.filled for request in requests if request.filled.turns]
    extras = [request.extras for request in requests if request.filled.turns]
    verdicts = await call.runtime.reward(call.node.role).score(judged) if judged else []
    results = checked_rewards(verdicts, judged)
    for index, sample in enumerate(judged):
        result = RewardResult(None, error=results) if isinstance(results, str) else results[index]
        if call.node.given_name is not None:  # a sample without a value is excluded, but later calls pack it, too
            sample.sequence_data[call.node.fields[0]] = 0.0 if result.value is None else result.value
        for one in [sample, *extras[index]]:
            if call.node.given_name is None:
                one.reward = result
            if result.error is not None and one.exclusion is None:
                cause = result.error.replace(f"sample {sample.id!r}: ", "")  # equal causes are counted together
                one.exclusion = f"reward failed: {cause}"


async def compute(call: FlowCall, requests: Sequence[RolloutRequest]) -> None:
    """Compute outputs of a trainer role in one call over all samples with tokens, and store them in the samples."""
    node = call.node
    present = [sample for request in requests for sample in request.samples if sample.loss_mask.any()]
    sources = node.arguments.get("data_sources")
    chosen, others = present, list[Sample]()
    if sources is not None:
        chosen = [sample for sample in present if sample.prompt.data_source in sources]
        others = [sample for sample in present if sample.prompt.data_source not in sources]
    asked = output_request(node, call.sampling)
    if not chosen:
        _fill_with_zeros(call, others, asked)
        return
    batch = call.packer.pack(chosen)
    outputs = await call.runtime.trainer(node.role).compute(batch, asked)
    check_outputs(outputs, batch, asked, call.origin, {spec.name: spec for spec in node.outputs})
    for spec in node.outputs:
        field, values = node.output_fields[spec.name], outputs[spec.name]
        if spec.per == "sequence":
            for sample, number in zip(chosen, values.tolist(), strict=True):
                sample.sequence_data[field] = number
        else:
            for sample, array in zip(chosen, call.packer.unpack(values, batch, field), strict=True):
                sample.token_data[field] = array
    _fill_with_zeros(call, others, asked)  # together with the others: a call beside this one packs all samples


def _fill_with_zeros(call: FlowCall, samples: Sequence[Sample], asked: OutputRequest) -> None:
    """What samples have of a call that leaves them out: a batch needs the same data of all."""
    if not samples:
        return
    batch = call.packer.pack(samples)
    for spec in call.node.outputs:
        row = [size or 0 for size in row_shape(spec, batch, asked)]
        for sample in samples:
            dtype = np.float32 if spec.dtype == "float" else np.int64
            sample.token_data[call.node.output_fields[spec.name]] = np.zeros((len(sample.token_ids), *row), dtype)


def sampled_as(arguments: Mapping[str, Any], sampling: SamplingParams) -> SamplingParams:
    """``sampling`` with the arguments of one call replacing its values."""
    own = {name: value for name, value in arguments.items() if name != "n"}
    if "stop" in own:
        own["stop"] = tuple(own["stop"])
    return replace(sampling, **own) if own else sampling


def output_request(node: Node, sampling: SamplingParams) -> OutputRequest:
    """What a call on a trainer asks for, in a run that samples so."""
    arguments = {name: value for name, value in node.arguments.items() if name not in _NOT_OUTPUTS}
    temperature = node.arguments.get("temperature", sampling.temperature or 1.0)
    return OutputRequest(frozenset(node.method.outputs), temperature, arguments)


async def apply_function(call: FlowCall, requests: Sequence[RolloutRequest]) -> None:
    """``m.apply``: apply a user's function to the samples that are not excluded. Samples missing from its result become
    excluded.
    """
    function = call.node.function
    assert function is not None, "the trace sets the function of every apply"
    given = [request.filled for request in requests if request.filled.exclusion is None]
    given = await call.runtime.data.aget(given)  # a function may read every field
    changed = await call.functions.call(function, given, dict(call.node.arguments), drop=call.fields) if given else {}
    for request in requests:
        if request.filled.exclusion is None:
            if request.sample_id in changed:
                request.sample = changed[request.sample_id]
            else:
                request.filled.exclusion = f"left out by {function.name}"
        request.dropped = request.filled.exclusion is not None
