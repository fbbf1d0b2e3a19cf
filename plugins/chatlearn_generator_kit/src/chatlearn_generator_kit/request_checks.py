"""Checks that refuse requests no generator can sample, before an engine sees them."""

from __future__ import annotations

import numpy as np

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types import KEPT_IDS, GenerateRequest, LogprobBasis


def check_request(
    request: GenerateRequest,
    basis: LogprobBasis,
    name: str,
    model_length: int,
    vocab_size: int,
    *,
    scores: bool = False,
    keeps_ids: bool = False,
    classifies: bool = False,
) -> None:
    """Refuse a request that cannot be sampled, scored or classified.

    Args:
        request: the request.
        basis: basis of the logprobs that the generator will return.
        name: role, replica and backend, for messages.
        model_length: longest sequence in tokens.
        vocab_size: number of token ids.
        scores: whether the generator takes requests with ``forced_ids``.
        keeps_ids: whether the generator takes requests with ``max_kept_ids``.
        classifies: whether the generator takes requests to ``classify``, and no others.

    Raises:
        BackendError: names the request, the numbers and the remedy.
    """

    def refuse(problem: str) -> BackendError:
        return BackendError(f"{name}, request {request.id!r}: {problem}")

    prompt_length = len(request.prompt_ids)
    sampling = request.sampling
    if prompt_length == 0:
        raise refuse("the prompt is empty; give at least one token")
    if request.classify and not classifies:
        raise refuse(
            "it requests the score of a sequence classifier, which this generator does not serve "
            "(GeneratorSpec.classifies)"
        )
    if classifies and not request.classify:
        raise refuse("it requests tokens, but this generator serves a sequence classifier, which samples nothing")
    forced = request.forced_ids
    if forced is not None and not scores:
        raise refuse(
            "it requests logprobs of given tokens, which this generator does not support (GeneratorSpec.scores)"
        )
    if forced is not None and (sampling.top_p < 1.0 or sampling.top_k):
        raise refuse(
            f"top_p {sampling.top_p} and top_k {sampling.top_k} cut the distribution, and a token outside it has no "
            "logprob; score with top_p 1 and top_k 0"
        )
    if sampling.max_kept_ids and not keeps_ids:
        raise refuse(
            f"it requests the ids that tokens are sampled from (max_kept_ids={sampling.max_kept_ids}), which this "
            "generator does not return (GeneratorSpec.kept_ids)"
        )
    given = request.prompt_ids if forced is None else np.concatenate([request.prompt_ids, forced])
    largest, smallest = int(np.max(given)), int(np.min(given))
    if smallest < 0 or largest >= vocab_size:
        raise refuse(
            f"prompt token {smallest if smallest < 0 else largest} is outside the model's vocabulary of {vocab_size} "
            "tokens; use the tokenizer that belongs to the model"
        )
    if request.classify:
        if prompt_length > model_length:
            raise refuse(f"it has {prompt_length} tokens, but the model takes {model_length}")
        return
    if prompt_length >= model_length:
        raise refuse(
            f"the prompt has {prompt_length} tokens, but the model takes {model_length} including the completion; "
            "lower data.max_prompt_tokens so that such prompts are filtered out"
        )
    if prompt_length + sampling.max_tokens > model_length:
        raise refuse(
            f"the prompt's {prompt_length} tokens and max_tokens {sampling.max_tokens} add up to "
            f"{prompt_length + sampling.max_tokens}, but the model takes {model_length}; lower sampling.max_tokens to "
            f"{model_length - prompt_length} or less, or data.max_prompt_tokens"
        )
    prior = request.resume_from
    if prior is not None:
        if prior.basis != basis:
            raise refuse(
                f"it resumes logprobs of basis {prior.basis} with sampling of basis {basis}; resume with the "
                "temperature, top_p and top_k of the first part"
            )
        if sampling.max_kept_ids and (
            KEPT_IDS not in prior.token_data or prior.token_data[KEPT_IDS].shape[1:] != (sampling.max_kept_ids,)
        ):
            raise refuse(
                f"it resumes a completion without the {sampling.max_kept_ids} ids per token that its sampling asks "
                "for; resume with the sampling parameters of the first part"
            )
        if prior.finish_reason == "stop":
            raise refuse("it resumes a completion that has ended (finish reason 'stop')")
        if len(prior.token_ids) > sampling.max_tokens:
            raise refuse(
                f"it resumes a completion of {len(prior.token_ids)} tokens, but max_tokens {sampling.max_tokens}"
                " limits the "
                "whole completion"
            )
