"""The flow method ``trainer.mismatched_logprobs``: logprobs of completions after the prompts of other examples.

KTO (arXiv 2402.01306, section 4.1) estimates KL(π ‖ ref) from such pairs: prompt i with the completion of prompt j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from chatlearn_algorithms.role_logprobs import role_logprobs
from chatlearn_core.exceptions import DataError
from chatlearn_core.executor.scheduler import FlowCall
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.types import Sample


async def mismatched_logprobs(call: FlowCall, requests: Sequence[RolloutRequest]) -> None:
    """Write the summed logprob of each sample's partner into ``sequence_data``: computed by the role, or read from the
    run's cache.
    """
    samples = [sample for request in requests for sample in request.samples if sample.loss_mask.any()]
    if not samples:
        return
    others = mismatched(samples, call.max_length)
    found: Sequence[npt.NDArray[Any]]
    if call.cached is not None and call.node.kind == "cache":
        # Of a pair whose completion the longest length cuts off, nothing is kept.
        found = [call.cached.arrays(call, one)["logprobs"] if one.loss_mask.any() else np.zeros(1) for one in others]
    else:
        found = await role_logprobs(call, others)
    for sample, logprobs in zip(samples, found, strict=True):
        sample.sequence_data[call.node.fields[0]] = float(logprobs.sum(dtype=np.float64))


def mismatched(samples: Sequence[Sample], max_length: int) -> list[Sample]:
    """Pair each sample's prompt with the completion of the next sample (cyclically) of another example.

    Sequences are cut at ``max_length`` tokens.

    Raises:
        DataError: all samples belong to one example.
    """
    found: list[Sample] = []
    for place, sample in enumerate(samples):
        order = (*samples[place + 1 :], *samples[:place])
        other = next((one for one in order if one.example_id != sample.example_id), None)
        if other is None:
            raise DataError(
                f"the {len(samples)} completions of this step are all of example {sample.example_id!r}, but"
                " a mismatched pair needs the completion of another example: set train.prompts_per_step to at least 2"
                " (and "
                "have as many examples), or algorithm.options.reference_point: zero"
            )
        start, own = other.num_prompt_tokens, sample.num_prompt_tokens
        prompt = np.asarray(sample.token_ids[:own])
        tokens = np.concatenate([prompt, np.asarray(other.token_ids[start:])])[:max_length]
        mask = np.concatenate([np.zeros(own, np.bool_), np.asarray(other.loss_mask[start:])])[:max_length]
        found.append(replace(sample, token_ids=tokens, loss_mask=mask, token_data={}, sequence_data={}))
    return found
