"""The buffer: groups enter and leave whole, the oldest first, and come back from a checkpoint as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from chatlearn_core.executor.rollout_buffer import RolloutBuffer
from chatlearn_core.executor.rollout_producer import make_requests
from chatlearn_core.executor.rollouts.saved import load_rollouts, save_rollouts
from chatlearn_core.executor.step_samples import FinishedGroup, RolloutRequest, finished_groups, samples_of
from chatlearn_core.types import (
    Completion,
    ExampleDraw,
    Media,
    Prompt,
    RewardResult,
    SamplingParams,
    VersionSpan,
    sample_from_completion,
)

SAMPLING = SamplingParams(8, temperature=0.5, stop=("x", "y"))
PROMPTS = [Prompt(f"p{i}", np.array([i, 2]), "?", media=(Media("image", b"..."),)) for i in range(5)]


def requests_of(draw: ExampleDraw) -> list[RolloutRequest]:
    return make_requests([draw], 2, SAMPLING, seed=3)


def make_group(number: int, *versions: int) -> FinishedGroup:
    """Two samples with one token of each version."""
    requests = requests_of(ExampleDraw(PROMPTS[number], 0, f"p{number}@1"))
    for request in requests:
        assert request.generate_request is not None
        count = len(versions)
        completion = Completion(
            request.sample_id,
            np.arange(count),
            np.linspace(-1, 0, count, dtype=np.float32),
            SAMPLING.basis,
            "stop",
            request.generate_request.sampling,
            tuple(VersionSpan(i, i + 1, version) for i, version in enumerate(versions)),
            text="é",
        )
        request.sample = sample_from_completion(request.sample_id, request.group_id, request.prompt, completion)
    [group] = finished_groups(requests)
    return group


def test_groups_leave_in_the_order_in_which_they_came() -> None:
    buffer = RolloutBuffer(0)
    buffer.admit([make_group(1, 0), make_group(0, 0)])
    buffer.admit([make_group(2, 0)])
    assert [group.id for group in buffer.select(2)] == ["p1@0", "p0@0"]
    assert [group.id for group in buffer.groups] == ["p2@0"]
    assert [group.id for group in buffer.select()] == ["p2@0"]
    assert len(buffer) == 0
    assert buffer.select(1) == []


def test_what_a_step_adds_to_samples_is_not_in_what_was_held_before() -> None:
    """A step that fails after it has taken samples leaves the checkpoint of the step before as it was."""
    buffer = RolloutBuffer(0)
    buffer.admit([make_group(0, 0)])
    before = buffer.copy()
    [group] = buffer.select()
    group.samples[0].exclusion = "zero_spread"
    group.samples[0].token_data["advantages"] = np.zeros(3)
    group.samples[0].sequence_data["value"] = 1.0
    [held] = before.groups
    assert (held.samples[0].exclusion, held.samples[0].sequence_data) == (None, {})
    assert "advantages" not in held.samples[0].token_data


def test_further_samples_of_a_rollout_are_copied_too() -> None:
    buffer = RolloutBuffer(0)
    buffer.admit([make_group(0, 0)])
    buffer.groups[0].requests[0].extras = [replace(buffer.groups[0].samples[0], id="summary")]
    before = buffer.copy()
    [group] = buffer.select()
    group.samples[1].exclusion = "zero_spread"
    assert [(sample.id, sample.exclusion) for sample in before.groups[0].samples] == [
        ("p0@0#0", None),
        ("summary", None),
        ("p0@0#1", None),
    ]


def test_a_group_is_too_old_with_its_oldest_token() -> None:
    buffer = RolloutBuffer(1)
    buffer.admit([make_group(0, 5, 7), make_group(1, 6, 7), make_group(2, 7)])
    assert buffer.evict(6) == []
    [evicted] = buffer.evict(7)
    assert evicted.id == "p0@0"
    assert {sample.exclusion for sample in evicted.samples} == {"stale: version 5 sampled it, the policy's is 7"}
    assert evicted.num_sampled_tokens == 4
    assert [group.id for group in buffer.groups] == ["p1@0", "p2@0"]


def test_what_only_other_models_sampled_is_never_too_old() -> None:
    rival = make_group(0, 0)
    for sample in rival.samples:
        sample.turns = tuple(replace(turn, generator="rival") for turn in sample.turns)
    buffer = RolloutBuffer(0, frozenset({"generator"}))
    buffer.admit([rival])
    assert buffer.evict(9) == []


def test_a_group_of_which_a_rollout_goes_on_is_not_finished() -> None:
    requests = [*make_group(0, 0).requests, *make_group(1, 0).requests]
    requests[1].left_out = True
    assert [group.id for group in finished_groups(requests)] == ["p1@0"]


def test_everything_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    buffer = RolloutBuffer(1)
    buffer.admit([make_group(3, 4, 5), make_group(1, 5)])
    first, second = samples_of(buffer.groups)[:2]
    first.reward = RewardResult(0.25, {"accuracy": 0.0}, np.array([0.5, -0.5], np.float32), step_ends=np.arange(2))
    first.token_data["experts"] = np.arange(8, dtype=np.int16).reshape(4, 2)
    first.sequence_data["judge"] = 0.1
    first.media = (Media("image", b"\x89PNG"), Media("box", np.array([1, 2])), Media("video", "https://example.org/v"))
    first.unit_id = "pair"
    second.reward = RewardResult(None, error="math: KeyError")
    second.exclusion = "reward failed: math: KeyError"
    buffer.groups[0].requests[1].dropped = True
    buffer.groups[1].requests[0].extras = [replace(samples_of(buffer.groups)[3], id="p1@0#0/summary")]
    save_rollouts(tmp_path, (), buffer.state_dict())
    saved = load_rollouts(tmp_path, PROMPTS, requests_of)
    restored = RolloutBuffer(1)
    restored.load_state_dict(saved.buffer, saved.requests_of)
    assert [group.id for group in restored.groups] == ["p3@0", "p1@0"]
    assert [request.dropped for group in restored.groups for request in group.requests] == [False, True, False, False]
    assert [sample.id for sample in samples_of(restored.groups)[2:]] == ["p1@0#0", "p1@0#0/summary", "p1@0#1"]
    for old, new in zip(samples_of(buffer.groups), samples_of(restored.groups), strict=True):
        assert _values(new) == _values(old)
    assert restored.groups[0].samples[0].prompt is PROMPTS[3]
    assert restored.groups[1].samples[0].media == PROMPTS[1].media


def _values(value: Any) -> Any:
    """Comparable: arrays as dtype, shape and bytes, records as their fields."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {name: _values(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_values(entry) for entry in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _values(getattr(value, name)) for name in value.__dataclass_fields__}
    return value
