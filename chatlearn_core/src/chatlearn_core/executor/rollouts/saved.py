"""Rollouts in a checkpoint: ``rollouts/state.json`` and arrays beside it.

An example is stored by its id and looked up in the data again; its requests are rebuilt from the run's settings, which
must not change when a run resumes. Stored is only what cannot be recomputed: tokens sampled by older weights, and
results computed for finished rollouts, including rewards.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, CheckpointError
from chatlearn_core.executor.array_state import read_array_state, write_array_state
from chatlearn_core.executor.rollouts.pending import Group, Progress
from chatlearn_core.executor.step_samples import FinishedGroup, RolloutRequest
from chatlearn_core.types import (
    Completion,
    Example,
    ExampleDraw,
    LogprobBasis,
    Media,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    Turn,
    VersionSpan,
)

FILE = Path("rollouts") / "state.json"
_FORMAT = 5
Described = Mapping[str, Any]
"""A group as JSON values and arrays."""


def save_rollouts(checkpoint: Path, pending: Sequence[Group], buffer: Described) -> None:
    """Write rollouts into a checkpoint's directory; write nothing if there are none.

    Args:
        pending: unfinished groups, with plain arrays.
        buffer: the state of the buffer.

    Raises:
        OSError: the disk cannot be written.
        CheckpointError: a sample has data that a checkpoint cannot hold.
    """
    if not pending and not buffer["groups"]:
        return
    file = checkpoint / FILE
    file.parent.mkdir()
    described = [_describe_pending(group) for group in pending]
    write_array_state(file, {"format": _FORMAT, "pending": described, "buffer": buffer})


@dataclass(slots=True, frozen=True)
class SavedRollouts:
    """The rollouts in a checkpoint.

    Args:
        pending: unfinished groups.
        buffer: the state of the buffer.
        requests_of: rebuilds the requests of one of the buffer's groups.
    """

    pending: tuple[Group, ...]
    buffer: Described
    requests_of: Callable[[Described], list[RolloutRequest]]


def load_rollouts(
    checkpoint: Path, examples: Iterable[Example], make_requests: Callable[[ExampleDraw], list[RolloutRequest]]
) -> SavedRollouts:
    """Load the rollouts of a checkpoint.

    Args:
        checkpoint: its directory.
        examples: the training data.
        make_requests: makes the requests of a draw.

    Raises:
        CheckpointError: the stored rollouts cannot be read, or belong to other data or settings.
    """
    file = checkpoint / FILE
    if not file.exists():
        return SavedRollouts((), {"groups": []}, _no_requests)
    try:
        content = read_array_state(file)
        if content["format"] != _FORMAT:
            raise CheckpointError(f"{file} has format {content['format']}; this version reads {_FORMAT}")
        groups = [*content["pending"], *content["buffer"]["groups"]]
        found = _find_examples({group["example"]: group["prompt_crc"] for group in groups}, examples, file)

        def requests_of(described: Described) -> list[RolloutRequest]:
            draw = ExampleDraw(found[described["example"]], described["draw"], described["seed_key"])
            requests = make_requests(draw)
            ids, stored = [request.sample_id for request in requests], [s["id"] for s in described["samples"]]
            if ids != stored:
                raise CheckpointError(f"{file} holds the samples {stored}, but with these settings they are {ids}")
            return requests

        pending = tuple(_restore_pending(described, requests_of(described)) for described in content["pending"])
        return SavedRollouts(pending, content["buffer"], requests_of)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{file} holds no rollouts: {type(error).__name__}: {error}") from error


def describe_finished(group: FinishedGroup) -> dict[str, Any]:
    """The group as JSON values and arrays."""
    samples = [
        _describe_sample(request.filled)
        | {"dropped": request.dropped, "extras": [_describe_sample(sample) for sample in request.extras]}
        for request in group.requests
    ]
    return _describe_draw(group.draw) | {"samples": samples}


def restore_finished(described: Described, requests: Sequence[RolloutRequest]) -> FinishedGroup:
    """The group that ``describe_finished`` described.

    Args:
        requests: its rebuilt requests.
    """
    for request, sample in zip(requests, described["samples"], strict=True):
        request.sample, request.dropped = _restore_sample(sample, request), sample["dropped"]
        request.extras = [_restore_sample(extra, request) for extra in sample["extras"]]
        request.calls_left = 0
    return FinishedGroup(tuple(requests))


def _no_requests(described: Described) -> list[RolloutRequest]:
    raise AssertionError("a checkpoint without rollouts has no requests")


def _describe_draw(draw: ExampleDraw) -> dict[str, Any]:
    example = draw.example
    return {"example": example.id, "prompt_crc": _crc(example.prompt), "draw": draw.draw, "seed_key": draw.seed_key}


def _crc(prompt: Prompt) -> int:
    """Checksum of the prompt's tokens, so that stored completions are not attached to another prompt."""
    return zlib.crc32(np.ascontiguousarray(prompt.token_ids, np.int64).tobytes())


# Pending groups


def _describe_pending(group: Group) -> dict[str, Any]:
    if group.is_finished:
        return describe_finished(FinishedGroup(tuple(group.requests))) | {"finished": True}
    samples = []
    for request, progress in zip(group.requests, group.progress, strict=True):
        assert request.generate_request is not None, "partial rollouts are of prompts"
        sampling = asdict(request.generate_request.sampling)  # a schedule may have changed it for that step
        samples.append({**_describe_progress(progress), "id": request.sample_id, "sampling": sampling})
    return _describe_draw(group.draw) | {"samples": samples}


def _describe_progress(progress: Progress) -> dict[str, Any]:
    described: dict[str, Any] = {"rounds": progress.rounds, "digest": progress.digest}
    if progress.failure is not None:
        described["failure"] = str(progress.failure)
        described["timed_out"] = isinstance(progress.failure, BackendTimeoutError)
    elif progress.completion is not None:
        described["completion"] = _describe_completion(progress.completion)
        described["sampling"] = asdict(progress.completion.sampling)
    return described | {"turns": {name: _describe_progress(turn) for name, turn in progress.turns.items()}}


def _describe_completion(completion: Completion) -> dict[str, Any]:
    own = {"token_ids": completion.token_ids, "logprobs": completion.logprobs}
    if completion.raw_logprobs is not None:
        own["raw_logprobs"] = completion.raw_logprobs
    if completion.prompt_ids is not None:
        own["prompt_ids"] = completion.prompt_ids
    return {
        "finish_reason": completion.finish_reason,
        "basis": asdict(completion.basis),
        "version_spans": _describe_spans(completion.version_spans),
        "text": completion.text,
        "num_cached_tokens": completion.num_cached_tokens,
        "arrays": own,
        "token_data": dict(completion.token_data),
        "prompt_token_data": dict(completion.prompt_token_data),
    }


def _restore_pending(described: Described, requests: list[RolloutRequest]) -> Group:
    if described.get("finished"):
        return Group(list(restore_finished(described, requests).requests))
    pairs = list(zip(described["samples"], requests, strict=True))
    for sample, request in pairs:
        assert request.generate_request is not None, "partial rollouts are of prompts"
        request.generate_request = replace(request.generate_request, sampling=_restore_sampling(sample["sampling"]))
    return Group(requests, [_restore_progress(sample, request.sample_id) for sample, request in pairs])


def _restore_progress(described: Described, request_id: str) -> Progress:
    failure, completion = None, None
    if "failure" in described:
        failure = (BackendTimeoutError if described["timed_out"] else BackendError)(described["failure"])
    elif "completion" in described:
        completion = _restore_completion(described["completion"], request_id, _restore_sampling(described["sampling"]))
    turns = {name: _restore_progress(turn, name) for name, turn in described["turns"].items()}
    return Progress(completion, failure, described["rounds"], described["digest"], turns)


def _restore_completion(stored: Described, request_id: str, sampling: SamplingParams) -> Completion:
    return Completion(
        request_id=request_id,
        basis=LogprobBasis(**stored["basis"]),
        finish_reason=stored["finish_reason"],
        sampling=sampling,
        version_spans=_restore_spans(stored["version_spans"]),
        text=stored["text"],
        num_cached_tokens=stored["num_cached_tokens"],
        token_data=stored["token_data"],
        prompt_token_data=stored["prompt_token_data"],
        **stored["arrays"],
    )


# Finished samples


def _describe_sample(sample: Sample) -> dict[str, Any]:
    known = sample.prompt.media
    expanded = len(sample.media) != len(known) or any(a is not b for a, b in zip(sample.media, known, strict=False))
    return {
        "id": sample.id,
        "unit_id": sample.unit_id,
        "num_prompt_tokens": sample.num_prompt_tokens,
        "token_ids": sample.token_ids,
        "loss_mask": sample.loss_mask,
        "turns": [_describe_turn(turn) for turn in sample.turns],
        "reward": None if sample.reward is None else _describe_reward(sample.reward),
        "media": [_describe_media(media) for media in sample.media] if expanded else None,
        "token_data": dict(sample.token_data),
        "sequence_data": dict(sample.sequence_data),
        "exclusion": sample.exclusion,
    }


def _restore_sample(stored: Described, request: RolloutRequest) -> Sample:
    prompt = request.prompt
    media = stored["media"]
    return Sample(
        stored["id"],
        request.group_id,
        prompt,
        stored["token_ids"],
        stored["loss_mask"],
        num_prompt_tokens=stored["num_prompt_tokens"],
        turns=tuple(_restore_turn(turn) for turn in stored["turns"]),
        reward=None if stored["reward"] is None else RewardResult(**stored["reward"]),
        unit_id=stored["unit_id"],
        media=prompt.media if media is None else tuple(_restore_media(one) for one in media),
        token_data=stored["token_data"],
        sequence_data=stored["sequence_data"],
        exclusion=stored["exclusion"],
    )


def _describe_turn(turn: Turn) -> dict[str, Any]:
    return {
        "start": turn.start,
        "stop": turn.stop,
        "finish_reason": turn.finish_reason,
        "sampling": asdict(turn.sampling),
        "basis": asdict(turn.basis),
        "version_spans": _describe_spans(turn.version_spans),
        "text": turn.text,
        "request_id": turn.request_id,
        "generator": turn.generator,
    }


def _restore_turn(stored: Described) -> Turn:
    changed = {
        "sampling": _restore_sampling(stored["sampling"]),
        "basis": LogprobBasis(**stored["basis"]),
        "version_spans": _restore_spans(stored["version_spans"]),
    }
    return Turn(**{**stored, **changed})


def _restore_sampling(stored: Described) -> SamplingParams:
    tuples = {name: tuple(value) for name, value in stored.items() if isinstance(value, list)}
    return SamplingParams(**{**stored, **tuples})


def _describe_reward(reward: RewardResult) -> dict[str, Any]:
    values, ends = reward.token_values, reward.step_ends
    return {
        "value": reward.value,
        "components": dict(reward.components),
        "token_values": None if values is None else np.asarray(values),
        "error": reward.error,
        "answer": reward.answer,
        "step_ends": None if ends is None else np.asarray(ends),
    }


def _describe_media(media: Media) -> dict[str, Any]:
    content = media.content
    is_bytes = isinstance(content, bytes)
    return {
        "kind": media.kind,
        "is_bytes": is_bytes,
        "content": np.frombuffer(content, np.uint8) if is_bytes else content,
    }


def _restore_media(stored: Described) -> Media:
    content = stored["content"]
    return Media(stored["kind"], content.tobytes() if stored["is_bytes"] else content)


def _describe_spans(spans: Iterable[VersionSpan]) -> list[list[int]]:
    return [[span.start, span.stop, span.version] for span in spans]


def _restore_spans(stored: Iterable[Sequence[int]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(*span) for span in stored)


def _find_examples(crcs: Mapping[str, int], examples: Iterable[Example], file: Path) -> dict[str, Example]:
    """The examples with these ids.

    Args:
        crcs: id -> result of ``_crc`` when the rollouts were stored.
        examples: the examples to search.
        file: name of the file, for messages.
    """
    found = {example.id: example for example in examples if example.id in crcs}
    if missing := sorted(crcs.keys() - found.keys()):
        raise CheckpointError(
            f"{file} holds rollouts of prompts that the training data does not have: {', '.join(missing[:5])}. Restore "
            "the data, or start a new run"
        )
    if changed := sorted(name for name, example in found.items() if crcs[name] != _crc(example.prompt)):
        raise CheckpointError(
            f"{file} holds rollouts of prompts that have other tokens in the training data: {', '.join(changed[:5])}. "
            "Restore data and tokenizer, or start a new run"
        )
    return found
