"""Translates one request to SGLang's arguments, and SGLang's output to plain builtins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

WHOLE_VOCABULARY = -1
SEED_LIMIT = 2**63


def engine_request(
    rid: str, input_ids: Sequence[int], sampling: Mapping[str, Any], adapter: str | None = None
) -> dict[str, Any]:
    """Return the arguments of ``Engine.async_generate``.

    Args:
        rid: the request's name in the engine; no name may be a prefix of another.
        input_ids: [T] context.
        sampling: fields of ``SamplingParams``; the seed may be any integer.
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
            ``num_cached_tokens``.
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
    }


def cut_short(reply: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Truncate an answer after ``count`` tokens, whose last is a stop token; the engine may have sampled
    more by then.
    """
    return {
        **reply,
        "token_ids": reply["token_ids"][:count],
        "logprobs": reply["logprobs"][:count],
        "finish": {"type": "stop", "matched": reply["token_ids"][count - 1]},
        "spans": [(start, min(stop, count), version) for start, stop, version in reply["spans"] if start < count],
    }


def fresh_tokens(chunk: Mapping[str, Any], num_seen: int) -> list[int]:
    """Return the tokens of a streamed chunk after the first ``num_seen``; a chunk has the whole completion so far."""
    return list(chunk["output_ids"][num_seen:])


@cache
def _cut_logits() -> str:
    from .logit_processor import CutLogits

    serialised: str = CutLogits.to_str()
    return serialised
