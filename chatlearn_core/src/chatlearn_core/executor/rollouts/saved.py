"""Pending rollouts in a checkpoint: ``rollouts/pending.json`` and the arrays beside it.

A prompt is stored by its id and found in the data again; its requests are made anew from the run's settings, which a
run that resumes must not change. Stored is what cannot be computed again: the tokens that older weights sampled.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, CheckpointError
from chatlearn_core.executor.rollouts.pending import Group, Progress
from chatlearn_core.executor.scheduler import Slot
from chatlearn_core.types import Completion, Demonstration, Example, LogprobBasis, Prompt, VersionSpan

DIRECTORY = "rollouts"
_STATE, _ARRAYS = "pending.json", "pending.npz"
_FORMAT = 1
Arrays = dict[str, npt.NDArray[Any]]


def save_pending(checkpoint: Path, groups: Sequence[Group]) -> None:
    """Write the groups into a checkpoint's directory; without any, nothing.

    Raises:
        OSError: the disk does not take it.
    """
    if not groups:
        return
    directory = checkpoint / DIRECTORY
    directory.mkdir()
    arrays: Arrays = {}
    described = [_describe(group, arrays) for group in groups]
    (directory / _STATE).write_text(json.dumps({"format": _FORMAT, "groups": described}), encoding="utf-8")
    with (directory / _ARRAYS).open("wb") as stream:
        np.savez(stream, **cast(Any, arrays))  # no array is named like an option of savez


def load_pending(
    checkpoint: Path, examples: Iterable[Example], make_slots: Callable[[Prompt, int], list[Slot]]
) -> tuple[Group, ...]:
    """The groups that a checkpoint holds.

    Args:
        checkpoint: its directory.
        examples: the training data.
        make_slots: the slots of a prompt that was drawn in a step.

    Raises:
        CheckpointError: what is stored cannot be read, or is of other data or settings.
    """
    file = checkpoint / DIRECTORY / _STATE
    if not file.exists():
        return ()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise CheckpointError(f"{file} has format {content['format']}; this version reads {_FORMAT}")
        described = content["groups"]
        prompts = _find_prompts({group["prompt"]: group.get("prompt_crc") for group in described}, examples, file)
        with np.load(file.with_name(_ARRAYS), allow_pickle=False) as arrays:
            return tuple(_restore(group, prompts, arrays, make_slots, file) for group in described)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{file} holds no pending rollouts: {type(error).__name__}: {error}") from error


def _describe(group: Group, arrays: Arrays) -> dict[str, Any]:
    samples = []
    for slot, progress in zip(group.slots, group.progress, strict=True):
        sample: dict[str, Any] = {"id": slot.sample_id, "rounds": progress.rounds}
        if progress.failure is not None:
            sample["failure"] = str(progress.failure)
            sample["timed_out"] = isinstance(progress.failure, BackendTimeoutError)
        elif progress.completion is not None:
            sample["completion"] = _describe_completion(progress.completion, arrays)
        samples.append(sample)
    return {"prompt": group.prompt.id, "prompt_crc": _crc(group.prompt), "step": group.step, "samples": samples}


def _crc(prompt: Prompt) -> int:
    """Of the tokens: what was sampled after others must not go on after these."""
    return zlib.crc32(np.ascontiguousarray(prompt.token_ids, np.int64).tobytes())


def _describe_completion(completion: Completion, arrays: Arrays) -> dict[str, Any]:
    own: Arrays = {"token_ids": completion.token_ids, "logprobs": completion.logprobs}
    if completion.raw_logprobs is not None:
        own["raw_logprobs"] = completion.raw_logprobs

    def put(values: npt.NDArray[Any]) -> str:
        name = f"a{len(arrays)}"  # samples and token data have names that no file may have
        arrays[name] = np.asarray(values)
        return name

    return {
        "finish_reason": completion.finish_reason,
        "basis": asdict(completion.basis),
        "version_spans": [[span.start, span.stop, span.version] for span in completion.version_spans],
        "text": completion.text,
        "num_cached_tokens": completion.num_cached_tokens,
        "arrays": {name: put(values) for name, values in own.items()},
        "token_data": {name: put(values) for name, values in completion.token_data.items()},
    }


def _restore(
    described: Mapping[str, Any],
    prompts: Mapping[str, Prompt],
    arrays: Mapping[str, npt.NDArray[Any]],
    make_slots: Callable[[Prompt, int], list[Slot]],
    file: Path,
) -> Group:
    group = Group(described["step"], make_slots(prompts[described["prompt"]], described["step"]))
    ids, stored = [slot.sample_id for slot in group.slots], [sample["id"] for sample in described["samples"]]
    if ids != stored:
        raise CheckpointError(f"{file} holds the samples {stored}, but with these settings they are {ids}")
    group.progress = [
        _restore_progress(sample, slot, arrays) for sample, slot in zip(described["samples"], group.slots, strict=True)
    ]
    return group


def _restore_progress(sample: Mapping[str, Any], slot: Slot, arrays: Mapping[str, npt.NDArray[Any]]) -> Progress:
    if "failure" in sample:
        kind = BackendTimeoutError if sample["timed_out"] else BackendError
        return Progress(failure=kind(sample["failure"]), rounds=sample["rounds"])
    if "completion" not in sample:
        return Progress(rounds=sample["rounds"])
    stored = sample["completion"]
    assert slot.request is not None, "partial rollouts are of prompts"
    completion = Completion(
        request_id=slot.sample_id,
        basis=LogprobBasis(**stored["basis"]),
        finish_reason=stored["finish_reason"],
        sampling=slot.request.sampling,
        version_spans=tuple(VersionSpan(*span) for span in stored["version_spans"]),
        text=stored["text"],
        num_cached_tokens=stored["num_cached_tokens"],
        token_data={name: arrays[key] for name, key in stored["token_data"].items()},
        **{name: arrays[key] for name, key in stored["arrays"].items()},
    )
    return Progress(completion, rounds=sample["rounds"])


def _find_prompts(crcs: Mapping[str, int | None], examples: Iterable[Example], file: Path) -> dict[str, Prompt]:
    """The prompts of these ids. The sampler numbers the repeats of a prompt in a batch: ``p~2`` is prompt ``p``.

    Args:
        crcs: id -> what ``_crc`` gave when the rollouts were stored; None in a checkpoint that does not say.
        examples: to look in.
        file: for messages.
    """
    wanted: dict[str, list[str]] = {}
    changed: set[str] = set()
    for name in crcs:
        wanted.setdefault(name, []).append(name)
        base, mark, number = name.rpartition("~")
        if mark and number.isdecimal():
            wanted.setdefault(base, []).append(name)
    found: dict[str, Prompt] = {}
    for example in examples:
        prompt = example.prompt if isinstance(example, Demonstration) else example
        for name in wanted.get(prompt.id, ()):
            if crcs[name] not in (None, _crc(prompt)):
                changed.add(name)
            elif name == prompt.id or name not in found:
                found[name] = prompt if name == prompt.id else replace(prompt, id=name)
    missing = sorted(crcs.keys() - found.keys())
    if changed & set(missing):
        raise CheckpointError(
            f"{file} holds rollouts of prompts that have other tokens in the training data: "
            f"{', '.join(sorted(changed & set(missing))[:5])}. Restore data and tokenizer, or start a new run"
        )
    if missing:
        raise CheckpointError(
            f"{file} holds rollouts of prompts that the training data does not have: {', '.join(missing[:5])}. Restore "
            "the data, or start a new run"
        )
    return found
