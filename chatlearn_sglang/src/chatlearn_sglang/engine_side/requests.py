"""Translates one request to SGLang's arguments, and SGLang's output to plain builtins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

WHOLE_VOCABULARY = -1
SEED_LIMIT = 2**63
MASKED = -1e30
"""Above the logprob of a masked token, which SGLang raises from minus infinity to the smallest float."""


def engine_request(
    rid: str, input_ids: Sequence[int], sampling: Mapping[str, Any], vocab_size: int, adapter: str | None = None
) -> dict[str, Any]:
    """Return the arguments of ``Engine.async_generate``.

    Args:
        rid: the request's name in the engine; no name may be a prefix of another.
        input_ids: [T] context.
        sampling: fields of ``SamplingParams``; the seed may be any integer. ``text_before``, which only ``Engine``
            reads, is the end of the resumed text, in which a stop string may begin. ``max_kept_ids`` above 0 asks for
            the ids that a token was sampled from, one more than may be kept.
        vocab_size: number of token ids.
        adapter: name of the LoRA adapter to use.
    """
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling["max_tokens"],
        "temperature": sampling["temperature"],
        "top_p": 1.0,
        "top_k": WHOLE_VOCABULARY,
        "stop": list(sampling["stop"]),
        "stop_token_ids": list(sampling["stop_token_ids"]),
        "ignore_eos": sampling["ignore_eos"],
        "sampling_seed": sampling["seed"] % SEED_LIMIT,
        "no_stop_trim": True,
    }
    request: dict[str, Any] = {
        "input_ids": list(input_ids),
        "sampling_params": parameters,
        "return_logprob": True,
        "rid": rid,
    }
    if adapter is not None:
        request["lora_path"] = adapter
    greedy = sampling["temperature"] == 0.0
    if sampling.get("max_kept_ids"):
        request["top_logprobs_num"] = 1 if greedy else min(sampling["max_kept_ids"] + 1, vocab_size)
    if not greedy and (sampling["top_k"] > 0 or sampling["top_p"] < 1.0):
        parameters["custom_params"] = {name: sampling[name] for name in ("temperature", "top_k", "top_p")}
        request["custom_logit_processor"] = _cut_logits()
    return request


def answer(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return SGLang's output as plain builtins.

    Returns:
        ``token_ids`` [C]; ``logprobs`` [C], None where SGLang returned none; ``finish``: the finish reason, a mapping
            such as
            ``{"type": "stop", "matched": 2}``; ``text``; ``spans``: (start, stop, version) of policy versions;
            ``num_cached_tokens``; ``kept``: for each token, the ids among the most likely that were not masked, which
            is empty where the request did not ask for them.
    """
    meta = output["meta_info"]
    token_ids = list(output["output_ids"])
    spans = meta.get("weight_versions") or [
        {"start": 0, "end": len(token_ids), "version": meta.get("weight_version", "0")}
    ]
    return {
        "token_ids": token_ids,
        "logprobs": [entry[0] for entry in meta.get("output_token_logprobs", ())],
        "finish": dict(meta["finish_reason"] or {}),
        "text": output.get("text", ""),
        "spans": [(int(span["start"]), int(span["end"]), int(span["version"])) for span in spans],
        "num_cached_tokens": int(meta.get("cached_tokens", 0)),
        "kept": [
            [token for logprob, token, _ in row or () if logprob > MASKED]
            for row in meta.get("output_top_logprobs") or ()
        ],
    }


def cut_short(reply: Mapping[str, Any], count: int, text: str) -> dict[str, Any]:
    """Truncate an answer after ``count`` tokens, whose last is a stop token or completes a stop string, and whose text
    is ``text``; the engine may have sampled more by then.
    """
    return {
        **reply,
        "text": text,
        "token_ids": reply["token_ids"][:count],
        "logprobs": reply["logprobs"][:count],
        "kept": reply["kept"][:count],
        "finish": {"type": "stop", "matched": reply["token_ids"][count - 1]},
        "spans": [(start, min(stop, count), version) for start, stop, version in reply["spans"] if start < count],
    }


def spanning_stop(
    before: str, stops: Sequence[str], token_ids: Sequence[int], num_seen: int, decode: Callable[[Sequence[int]], str]
) -> int | None:
    """Return which of the tokens after the first ``num_seen`` completes a stop string that begins in ``before``; None
    if none does. SGLang takes resumed tokens for a part of the prompt, so it does not find such a stop string.
    """
    for count in range(num_seen + 1, len(token_ids) + 1):
        text = decode(token_ids[:count])
        if any(stop in before + text[: len(stop) - 1] for stop in stops if stop not in before):
            return count - 1 - num_seen
    return None


def fresh_tokens(chunk: Mapping[str, Any], num_seen: int) -> list[int]:
    """Return the tokens of a streamed chunk after the first ``num_seen``; a chunk has the whole completion so far."""
    return list(chunk["output_ids"][num_seen:])


@cache
def _cut_logits() -> str:
    from .logit_processor import CutLogits

    serialised: str = CutLogits.to_str()
    return serialised
