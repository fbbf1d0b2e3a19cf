"""Rollouts in a checkpoint: every value comes back, and what does not fit is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, CheckpointError
from chatlearn_core.executor.rollout_producer import make_requests
from chatlearn_core.executor.rollouts.pending import Group, Progress
from chatlearn_core.executor.rollouts.saved import (
    load_rollouts,
    save_rollouts,
)
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.types import (
    Completion,
    ExampleDraw,
    LogprobBasis,
    RewardResult,
    SamplingParams,
    VersionSpan,
    sample_from_completion,
)

EMPTY: dict[str, Any] = {"groups": []}
SAMPLING = SamplingParams(9, temperature=0.7, top_k=5)


def requests_of(group_size: int) -> Callable[[ExampleDraw], list[RolloutRequest]]:
    return lambda draw: make_requests([draw], group_size, SAMPLING, seed=3)


@pytest.fixture
def group(prompts: Any) -> Group:
    requests = requests_of(4)(ExampleDraw(prompts[2], 1, "p2~2@5"))
    assert requests[0].generate_request is not None
    completion = Completion(
        request_id=requests[0].sample_id,
        token_ids=np.array([5, 6, 7]),
        logprobs=np.array([-0.1, -np.pi, -1e-9], np.float32),
        basis=LogprobBasis(0.7, 1.0, 5),
        finish_reason="abort",
        sampling=requests[0].generate_request.sampling,
        version_spans=(VersionSpan(0, 1, 4), VersionSpan(1, 3, 5)),
        raw_logprobs=np.array([-0.2, -3, -1], np.float32),
        text="é\n",
        num_cached_tokens=3,
        token_data={"experts/layer 0": np.arange(6, dtype=np.int16).reshape(3, 2)},
        prompt_ids=np.array([1, 2, 2, 3]),
        prompt_token_data={"experts/layer 0": np.arange(8, dtype=np.int16).reshape(4, 2)},
    )
    progress = [
        Progress(completion, rounds=2),
        Progress(
            replace(completion, finish_reason="stop", raw_logprobs=None, token_data={}, prompt_ids=None), rounds=1
        ),
        Progress(failure=BackendTimeoutError("nothing in 3 s"), rounds=1),
        Progress(),
    ]
    return Group(requests, progress)


def test_every_value_comes_back(group: Group, prompts: Any, tmp_path: Path) -> None:
    save_rollouts(tmp_path, [group], EMPTY)
    [restored] = load_rollouts(tmp_path, prompts, requests_of(4)).pending
    assert restored.draw.example is prompts[2]
    assert (restored.draw.draw, restored.draw.seed_key) == (1, "p2~2@5")
    assert [request.generate_request and request.generate_request.sampling for request in restored.requests] == [
        request.generate_request and request.generate_request.sampling for request in group.requests
    ], "seeds included"
    assert [progress.rounds for progress in restored.progress] == [2, 1, 1, 0]
    for old, new in zip(group.progress[:2], restored.progress[:2], strict=True):
        assert old.completion is not None
        assert new.completion is not None
        for name in Completion.__match_args__:
            before, after = getattr(old.completion, name), getattr(new.completion, name)
            if name in ("token_ids", "logprobs", "raw_logprobs", "prompt_ids") and before is not None:
                assert after.dtype == before.dtype
                assert after.tobytes() == before.tobytes()
            elif name.endswith("token_data"):
                assert {k: (v.dtype, v.tolist()) for k, v in after.items()} == {
                    k: (v.dtype, v.tolist()) for k, v in before.items()
                }
            elif name not in ("request_id", "sampling"):
                assert after == before
    assert isinstance(restored.progress[2].failure, BackendTimeoutError)
    assert str(restored.progress[2].failure) == "nothing in 3 s"
    assert restored.progress[3].completion is None


def test_rollouts_go_on_as_they_were_sampled_when_they_began(group: Group, prompts: Any, tmp_path: Path) -> None:
    """A schedule or a step policy may have changed the sampling of that step."""
    request = group.requests[0].generate_request
    assert request is not None
    hotter = replace(request.sampling, temperature=1.3, stop=("x",))
    group.requests[0].generate_request = replace(request, sampling=hotter)
    save_rollouts(tmp_path, [group], EMPTY)
    [restored] = load_rollouts(tmp_path, prompts, requests_of(4)).pending
    assert restored.requests[0].generate_request is not None
    assert restored.requests[0].generate_request.sampling == hotter
    assert restored.progress[0].completion is not None
    assert restored.progress[0].completion.sampling == hotter


def test_a_failure_that_is_no_timeout_stays_one(group: Group, prompts: Any, tmp_path: Path) -> None:
    group.progress[2] = Progress(failure=BackendError("refused"))
    save_rollouts(tmp_path, [group], EMPTY)
    [restored] = load_rollouts(tmp_path, prompts, requests_of(4)).pending
    assert type(restored.progress[2].failure) is BackendError


def test_requests_of_a_rollout_come_back_with_their_answers(group: Group, prompts: Any, tmp_path: Path) -> None:
    whole, refused = group.progress[1], Progress(failure=BackendError("refused"), digest=8)
    assert whole.completion is not None
    turn = replace(whole.completion, sampling=SamplingParams(5, seed=77, stop=("x",)))
    group.progress[0] = Progress(turns={"p2@1#0/0": Progress(turn, digest=1 << 31), "p2@1#0/1": refused})
    save_rollouts(tmp_path, [group], EMPTY)
    [restored] = load_rollouts(tmp_path, prompts, requests_of(4)).pending
    first, second = restored.progress[0].turns.items()
    assert first[0] == "p2@1#0/0"
    assert first[1].digest == 1 << 31
    assert first[1].completion is not None
    assert first[1].completion.request_id == "p2@1#0/0"
    assert first[1].completion.sampling == turn.sampling, "not that of the rollout"
    assert first[1].completion.token_ids.tolist() == [5, 6, 7]
    assert (second[0], str(second[1].failure), second[1].digest) == ("p2@1#0/1", "refused", 8)
    assert all(not progress.turns for progress in restored.progress[1:])


def test_two_draws_of_an_example_are_two_groups(prompts: Any, tmp_path: Path) -> None:
    draws = [ExampleDraw(prompts[1], 0, "p1@3"), ExampleDraw(prompts[1], 1, "p1~2@3")]
    save_rollouts(tmp_path, [Group(requests_of(1)(draw)) for draw in draws], EMPTY)
    restored = load_rollouts(tmp_path, prompts, requests_of(1)).pending
    assert [group.requests[0].sample_id for group in restored] == ["p1@0#0", "p1@1#0"]
    assert [group.draw.seed_key for group in restored] == ["p1@3", "p1~2@3"]


def test_prompts_that_are_gone_are_named(group: Group, prompts: Any, tmp_path: Path) -> None:
    save_rollouts(tmp_path, [group], EMPTY)
    with pytest.raises(CheckpointError, match=r"state\.json holds rollouts of prompts .* not have: p2\. Restore"):
        load_rollouts(tmp_path, prompts[:2], requests_of(4))


def test_a_prompt_that_has_other_tokens_now_is_refused(group: Group, prompts: Any, tmp_path: Path) -> None:
    save_rollouts(tmp_path, [group], EMPTY)
    edited = [replace(prompts[2], token_ids=np.array([1, 2, 4]))]
    with pytest.raises(
        CheckpointError, match=r"prompts that have other tokens in the training data: p2\. Restore data"
    ):
        load_rollouts(tmp_path, edited, requests_of(4))


@pytest.mark.parametrize("length", [0, 100, -30])
def test_arrays_that_are_cut_short_are_said(length: int, group: Group, prompts: Any, tmp_path: Path) -> None:
    save_rollouts(tmp_path, [group], EMPTY)
    file = tmp_path / "rollouts" / "state.npz"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"state\.json holds no rollouts: (EOFError|BadZipFile)"):
        load_rollouts(tmp_path, prompts, requests_of(4))


def test_another_group_size_is_refused(group: Group, prompts: Any, tmp_path: Path) -> None:
    save_rollouts(tmp_path, [group], EMPTY)
    with pytest.raises(CheckpointError, match=r"holds the samples .*'p2@1#3'.* with these settings they are"):
        load_rollouts(tmp_path, prompts, requests_of(2))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:20], "holds no rollouts: JSONDecodeError"),
        (lambda text: json.dumps({"pending": []}), "KeyError: 'format'"),
        (lambda text: text.replace('"format": 5', '"format": 9'), "has format 9; this version reads 5"),
        (lambda text: text.replace('"a1"', '"b1"'), "KeyError"),
    ],
)
def test_damage_is_said(damage: Any, message: str, group: Group, prompts: Any, tmp_path: Path) -> None:
    save_rollouts(tmp_path, [group], EMPTY)
    file = tmp_path / "rollouts" / "state.json"
    file.write_text(damage(file.read_text()))
    with pytest.raises(CheckpointError, match=message):
        load_rollouts(tmp_path, prompts, requests_of(4))


def test_finished_groups_keep_their_place_among_the_pending(group: Group, prompts: Any, tmp_path: Path) -> None:
    """They wait for the groups before them to be trained on, with their samples and rewards."""
    requests = requests_of(2)(ExampleDraw(prompts[1], 0, "p1@3"))
    for request in requests:
        asked = request.generate_request
        assert asked is not None
        tokens, logprobs = np.array([4, 5]), np.array([-0.5, -1], np.float32)
        spans = (VersionSpan(0, 2, 1),)
        found = Completion(asked.id, tokens, logprobs, asked.sampling.basis, "stop", asked.sampling, spans)
        request.sample = sample_from_completion(asked.id, request.group_id, request.prompt, found, generator="g")
        request.sample.reward, request.calls_left = RewardResult(0.25, {"format": 1.0}), 0
    pending = [group, Group(requests), Group(requests_of(1)(ExampleDraw(prompts[0], 7, "p0@7")))]
    assert [one.is_finished for one in pending] == [False, True, False]
    save_rollouts(tmp_path, pending, EMPTY)

    def numbered(draw: ExampleDraw) -> list[RolloutRequest]:
        return requests_of({"p2@1": 4, "p1@0": 2, "p0@7": 1}[draw.group_id])(draw)

    restored = load_rollouts(tmp_path, prompts, numbered).pending
    assert [(one.id, one.is_finished) for one in restored] == [("p2@1", False), ("p1@0", True), ("p0@7", False)]
    [first, second] = [request.filled for request in restored[1].requests]
    assert (first.reward, second.reward) == (RewardResult(0.25, {"format": 1.0}),) * 2
    assert first.token_ids.tolist() == [*prompts[1].token_ids, 4, 5]
    assert first.turns[0].version_spans == (VersionSpan(0, 2, 1),)
