"""Pending rollouts in a checkpoint: every value comes back, and what does not fit is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, CheckpointError
from chatlearn_core.executor.environment import make_slots
from chatlearn_core.executor.rollouts.pending import Group, Progress
from chatlearn_core.executor.rollouts.saved import load_pending, save_pending
from chatlearn_core.executor.scheduler import Slot
from chatlearn_core.types import Completion, Demonstration, LogprobBasis, Prompt, SamplingParams, VersionSpan

SAMPLING = SamplingParams(9, temperature=0.7, top_k=5)


def slots_of(group_size: int) -> Callable[[Prompt, int], list[Slot]]:
    return lambda prompt, step: make_slots([prompt], step, group_size, SAMPLING, seed=3)


@pytest.fixture
def group(prompts: Any) -> Group:
    slots = slots_of(4)(prompts[2], 5)
    assert slots[0].request is not None
    completion = Completion(
        request_id=slots[0].sample_id,
        token_ids=np.array([5, 6, 7]),
        logprobs=np.array([-0.1, -np.pi, -1e-9], np.float32),
        basis=LogprobBasis(0.7, 1.0, 5),
        finish_reason="abort",
        sampling=slots[0].request.sampling,
        version_spans=(VersionSpan(0, 1, 4), VersionSpan(1, 3, 5)),
        raw_logprobs=np.array([-0.2, -3, -1], np.float32),
        text="é\n",
        num_cached_tokens=3,
        token_data={"experts/layer 0": np.arange(6, dtype=np.int16).reshape(3, 2)},
    )
    progress = [
        Progress(completion, rounds=2),
        Progress(replace(completion, finish_reason="stop", raw_logprobs=None, token_data={}), rounds=1),
        Progress(failure=BackendTimeoutError("nothing in 3 s"), rounds=1),
        Progress(),
    ]
    return Group(5, slots, progress)


def test_every_value_comes_back(group: Group, prompts: Any, tmp_path: Path) -> None:
    save_pending(tmp_path, [group])
    [restored] = load_pending(tmp_path, prompts, slots_of(4))
    assert (restored.step, restored.prompt) == (5, prompts[2])
    assert [slot.request and slot.request.sampling for slot in restored.slots] == [
        slot.request and slot.request.sampling for slot in group.slots
    ], "seeds included"
    assert [progress.rounds for progress in restored.progress] == [2, 1, 1, 0]
    for old, new in zip(group.progress[:2], restored.progress[:2], strict=True):
        assert old.completion is not None
        assert new.completion is not None
        for name in Completion.__match_args__:
            before, after = getattr(old.completion, name), getattr(new.completion, name)
            if name in ("token_ids", "logprobs", "raw_logprobs") and before is not None:
                assert after.dtype == before.dtype
                assert after.tobytes() == before.tobytes()
            elif name == "token_data":
                assert {k: (v.dtype, v.tolist()) for k, v in after.items()} == {
                    k: (v.dtype, v.tolist()) for k, v in before.items()
                }
            elif name not in ("request_id", "sampling"):
                assert after == before
    assert isinstance(restored.progress[2].failure, BackendTimeoutError)
    assert str(restored.progress[2].failure) == "nothing in 3 s"
    assert restored.progress[3].completion is None


def test_a_failure_that_is_no_timeout_stays_one(group: Group, prompts: Any, tmp_path: Path) -> None:
    group.progress[2] = Progress(failure=BackendError("refused"))
    save_pending(tmp_path, [group])
    [restored] = load_pending(tmp_path, prompts, slots_of(4))
    assert type(restored.progress[2].failure) is BackendError


@pytest.mark.parametrize("as_demonstrations", [False, True])
def test_repeats_of_a_prompt_are_found(as_demonstrations: bool, prompts: Any, tmp_path: Path) -> None:
    repeat, strange = replace(prompts[1], id="p1~2"), replace(prompts[1], id="a~3")
    save_pending(tmp_path, [Group(1, slots_of(1)(prompt, 1)) for prompt in (prompts[1], repeat, strange)])
    examples = [*prompts, strange, replace(prompts[3], id="a")]
    if as_demonstrations:
        examples = [Demonstration(prompt, prompt.token_ids) for prompt in examples]
    restored = load_pending(tmp_path, examples, slots_of(1))
    assert [group.slots[0].sample_id for group in restored] == ["p1@1#0", "p1~2@1#0", "a~3@1#0"]
    assert restored[2].prompt is strange, "a prompt that is called so, not a repeat of another"


def test_prompts_that_are_gone_are_named(group: Group, prompts: Any, tmp_path: Path) -> None:
    save_pending(tmp_path, [group])
    with pytest.raises(CheckpointError, match=r"pending\.json holds rollouts of prompts .* not have: p2\. Restore"):
        load_pending(tmp_path, prompts[:2], slots_of(4))


def test_a_prompt_that_has_other_tokens_now_is_refused(group: Group, prompts: Any, tmp_path: Path) -> None:
    save_pending(tmp_path, [group])
    edited = [replace(prompts[2], token_ids=np.array([1, 2, 4]))]
    with pytest.raises(
        CheckpointError, match=r"prompts that have other tokens in the training data: p2\. Restore data"
    ):
        load_pending(tmp_path, edited, slots_of(4))


def test_a_repeat_is_not_taken_for_a_prompt_that_is_called_like_it(prompts: Any, tmp_path: Path) -> None:
    repeat = replace(prompts[1], id="p1~2")
    save_pending(tmp_path, [Group(1, slots_of(1)(repeat, 1))])
    [restored] = load_pending(tmp_path, [replace(repeat, token_ids=np.array([9])), *prompts], slots_of(1))
    assert restored.prompt.token_ids.tolist() == prompts[1].token_ids.tolist()


def test_a_checkpoint_that_does_not_tell_the_tokens_is_read(group: Group, prompts: Any, tmp_path: Path) -> None:
    save_pending(tmp_path, [group])
    file = tmp_path / "rollouts" / "pending.json"
    content = json.loads(file.read_text())
    del content["groups"][0]["prompt_crc"]
    file.write_text(json.dumps(content))
    assert len(load_pending(tmp_path, prompts, slots_of(4))) == 1


@pytest.mark.parametrize("length", [0, 100, -30])
def test_arrays_that_are_cut_short_are_said(length: int, group: Group, prompts: Any, tmp_path: Path) -> None:
    save_pending(tmp_path, [group])
    file = tmp_path / "rollouts" / "pending.npz"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"pending\.json holds no pending rollouts: (EOFError|BadZipFile)"):
        load_pending(tmp_path, prompts, slots_of(4))


def test_another_group_size_is_refused(group: Group, prompts: Any, tmp_path: Path) -> None:
    save_pending(tmp_path, [group])
    with pytest.raises(CheckpointError, match=r"holds the samples .*'p2@5#3'.* with these settings they are"):
        load_pending(tmp_path, prompts, slots_of(2))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:20], "holds no pending rollouts: JSONDecodeError"),
        (lambda text: json.dumps({"groups": []}), "KeyError: 'format'"),
        (lambda text: text.replace('"format": 1', '"format": 9'), "has format 9; this version reads 1"),
        (lambda text: text.replace("a1", "b1"), "KeyError"),
    ],
)
def test_damage_is_said(damage: Any, message: str, group: Group, prompts: Any, tmp_path: Path) -> None:
    save_pending(tmp_path, [group])
    file = tmp_path / "rollouts" / "pending.json"
    file.write_text(damage(file.read_text()))
    with pytest.raises(CheckpointError, match=message):
        load_pending(tmp_path, prompts, slots_of(4))
