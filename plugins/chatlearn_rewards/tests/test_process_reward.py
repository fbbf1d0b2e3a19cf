"""Rewards of steps: where steps end in text and tokens, and what they are worth."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import ConfigError, DataError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    sample_from_completion,
    sample_with_turn,
)
from chatlearn_core.types.sample import sample_with_tokens
from chatlearn_hf.tiny import build_tiny_tokenizer
from chatlearn_rewards.completion_steps import StepTokens, split_steps
from chatlearn_rewards.function_reward import FunctionReward
from chatlearn_rewards.http_options import HttpOptions
from chatlearn_rewards.http_reward import HttpReward
from chatlearn_rewards.options import FunctionOptions
from chatlearn_rewards.process_options import ProcessOptions
from chatlearn_rewards.process_reward import ProcessReward
from chatlearn_testing.fakes.http_server import FakeHttpServer, HttpReply
from chatlearn_testing.fakes.role_handle import ScriptedHandle

TOKENIZER = build_tiny_tokenizer(400, ["one plus two = 3 \n\n", "so 1 + 2 = 3\n"] * 9)
END = "<|im_end|>"


def completion(ids: list[int], text: str) -> Completion:
    logprobs = np.zeros(len(ids), np.float32)
    token_ids = np.array(ids, np.int64)
    return Completion("r", token_ids, logprobs, RAW_BASIS, "stop", SamplingParams(max_tokens=64), (), text=text)


def sampled(text: str, end: str = END, index: int = 0) -> Sample:
    """A completion of the tiny tokenizer, ended by a special token that the text does not show."""
    ids = TOKENIZER.encode(text + end, add_special_tokens=False)
    prompt = Prompt("p", np.array([1, 2, 3]), "What?", messages=({"role": "user", "content": "What?"},))
    return sample_from_completion(f"p@0#{index}", "p@0", prompt, completion(ids, text))


def context(**handles: Any) -> RoleContext:
    return RoleContext("reward", handles=handles, load_tokenizer=lambda: TOKENIZER)


def scored(samples: list[Sample], role: RoleContext | None = None, **options: Any) -> list[RewardResult]:
    reward = ProcessReward(ProcessOptions(**options), role or context())
    reward.setup()
    return asyncio.run(reward.score(samples))


def pieces(sample: Sample, result: RewardResult) -> list[tuple[str, float]]:
    """The text of each step, as its tokens decode, and its reward."""
    assert result.step_ends is not None, result.error
    assert result.token_values is not None
    starts = [0, *(result.step_ends + 1)]
    ids = sample.completion_ids
    return [
        (TOKENIZER.decode(ids[start : end + 1].tolist()), float(result.token_values[end]))
        for start, end in zip(starts, result.step_ends, strict=False)
    ]


@pytest.mark.parametrize(
    ("text", "delimiter", "steps"),
    [
        ("a\nb\nc", "\n", ["a\n", "b\n", "c"]),
        ("a\n\n\nb\n", "\n", ["a\n\n\n", "b\n"]),
        ("\n\na\nb", "\n", ["\n\na\n", "b"]),
        ("a\n  \nb", "\n", ["a\n  \n", "b"]),
        ("one", "\n\n", ["one"]),
        (" \n ", "\n", []),
        ("", "\n", []),
        ("x## y## ", "##", ["x##", " y## "]),
    ],
)
def test_the_text_is_split_behind_delimiters(text: str, delimiter: str, steps: list[str]) -> None:
    assert [text[start:stop] for start, stop in split_steps(text, delimiter)] == steps


def test_steps_are_checked_and_end_with_their_last_token() -> None:
    sample = sampled("so 1 + 2 = 3\n\n2 * 3 = 7 ☃\nthat is it\n3 + 4 = 7")
    [result] = scored([sample])
    steps = [("so 1 + 2 = 3\n\n", 1.0), ("2 * 3 = 7 ☃\n", 0.0), ("that is it\n3 + 4 = 7" + END, 1.0)]
    assert pieces(sample, result) == steps, (
        "what has no equation is no step; the token that ends the turn is the last's"
    )
    assert (result.value, result.components) == (0.0, {"steps": 3.0, "step_mean": pytest.approx(2 / 3)})
    [result] = scored([sample], unchecked=-1.0)
    assert result.token_values is not None
    assert result.token_values[result.step_ends].tolist() == [1.0, 0.0, -1.0, 1.0]


@pytest.mark.parametrize(("give", "value"), [("mean", 2 / 3), ("min", 0.0), ("last", 1.0), ("product", 0.0)])
def test_steps_may_make_one_reward(give: str, value: float) -> None:
    [result] = scored([sampled("1 + 1 = 2\n1 + 1 = 3\n1 + 1 = 2")], give=give)
    assert (result.value, result.token_values) == (pytest.approx(value), None)
    [empty] = scored([sampled("hello")], give=give, without_steps=-2.0)
    assert empty.value == -2.0


def test_a_completion_without_steps_has_no_rewards_of_tokens() -> None:
    for text in ("hello", "", " \n"):
        [result] = scored([sampled(text)])
        assert result.value == 0.0
        assert result.step_ends is not None
        assert not len(result.step_ends)
        assert not result.token_values.any()


def test_steps_of_a_second_turn_are_found_behind_what_stands_between() -> None:
    first = sampled("1 + 1 = 2\n", end="")
    between = TOKENIZER.encode(" result: ok ", add_special_tokens=False)
    middle = sample_with_tokens(first, np.array(between))
    ids = TOKENIZER.encode("2 + 2 = 5" + END, add_special_tokens=False)
    sample = sample_with_turn(middle, completion(ids, "2 + 2 = 5"))
    [result] = scored([sample])
    assert result.step_ends.tolist() == [first.num_completion_tokens - 1, sample.num_completion_tokens - 1]
    assert result.token_values[result.step_ends].tolist() == [1.0, 0.0]


def test_text_that_is_not_of_the_tokens_is_an_error() -> None:
    sample = sampled("1 + 1 = 2")
    other = sample_from_completion("s", "g", sample.prompt, completion(sample.completion_ids.tolist(), "1 + 1 = 3"))
    [result] = scored([other])
    assert "sample 's': its text '1 + 1 = 3' is not what its tokens decode to" in (result.error or "")


def test_a_stop_string_that_is_cut_from_the_text_stays_in_the_last_step() -> None:
    ids = TOKENIZER.encode("1 + 1 = 2 STOP", add_special_tokens=False)
    sample = sample_from_completion("s", "g", sampled("").prompt, completion(ids, "1 + 1 = 2"))
    [result] = scored([sample])
    assert result.step_ends.tolist() == [len(ids) - 1]


def test_steps_in_one_token_are_one_step_of_their_mean() -> None:
    joined = TOKENIZER.encode("\n\n", add_special_tokens=False)
    assert len(joined) == 1, "a token that ends two steps"
    sample = sampled("ab\n\n")
    result = StepTokens(lambda: TOKENIZER, "test").result(sample, [(3, 1.0), (4, 0.0)])
    place = sample.completion_ids.tolist().index(joined[0])
    assert result.step_ends.tolist()[0] in (place, len(sample.completion_ids) - 1)
    assert sorted(set(result.token_values.tolist())) in ([0.0, 0.5], [0.0, 1.0])


@pytest.mark.parametrize("stops", [[0], [3, 2], [2, 2], [99]])
def test_stops_outside_the_text_are_refused(stops: list[int]) -> None:
    with pytest.raises(DataError, match="they must ascend from 1 to the 9 characters"):
        StepTokens(lambda: TOKENIZER, "test").result(sampled("1 + 1 = 2"), [(stop, 1.0) for stop in stops])


def test_too_many_steps_and_a_missing_tokenizer_are_said() -> None:
    [result, fine] = scored([sampled("a\n" * 5), sampled("1 + 1 = 2", index=1)], max_steps=4)
    assert result.error == "sample 'p@0#0': it has 5 steps, more than max_steps, 4"
    assert fine.error is None
    with pytest.raises(DataError, match="needs the tokenizer of the run's model"):
        scored([], RoleContext("reward"))
    with pytest.raises(ConfigError, match="has no model: set uses"):
        ProcessReward(ProcessOptions(rule="model"), context())


def test_a_reward_model_scores_each_prefix_in_a_call_a_group() -> None:
    handle = ScriptedHandle(scores=lambda ids: float(len(ids)))
    samples = [sampled("so\none"), sampled("so", index=1), sampled("", index=2)]
    results = scored(samples, context(model=handle), rule="model")
    [ids] = handle.batches
    assert ids == ("p@0#0/0", "p@0#0/1", "p@0#1/0")
    for result in results:
        assert result.token_values[result.step_ends].tolist() == [3 + end + 1 for end in result.step_ends.tolist()]
    assert [len(result.step_ends) for result in results] == [2, 1, 0]
    [result] = scored(
        [sampled("so")],
        context(model=ScriptedHandle(scores=lambda ids: 0.0)),
        rule="model",
        transform="sigmoid",
        give="last",
    )
    assert result.value == 0.5
    [result] = scored([sampled("so")], context(model=ScriptedHandle(scores=lambda ids: float("nan"))), rule="model")
    assert result.error == "sample 'p@0#0': the score of step 0 by role 'scripted' is nan"


@pytest.mark.engine
def test_scores_of_prefixes_are_those_of_a_head_at_every_token(tmp_path: Path) -> None:
    """Against transformers: the model's body once over the whole sequence, its head at the end of each step."""
    import torch

    from chatlearn_core.plugins.loader import discover_plugins
    from chatlearn_hf.plain_forward import load_plain_classifier
    from chatlearn_hf.tiny import build_tiny_classifier

    model = build_tiny_classifier(tmp_path / "rm", hidden=32, intermediate=64, tie=False, tokenizer=TOKENIZER)
    plain = load_plain_classifier(model).model
    registry = discover_plugins()
    record = registry.select("trainer", "fsdp", "test")
    source = ModelSource(str(model), str(model), head="reward")
    trainer = registry.load_factory(record)(registry.load_options(record)(), RoleContext("prm", source, device="cpu"))
    trainer.setup()

    class Handle(ScriptedHandle):
        async def compute(self, batch: Any, request: Any) -> Any:
            return trainer.compute(batch, request)

    sample = sampled("so 1 + 2 = 3\nplus two\none")
    [result] = scored([sample], context(model=Handle(scores=lambda ids: 0.0)), rule="model")
    trainer.close()
    with torch.no_grad():
        hidden = plain.model(torch.tensor(sample.token_ids)[None]).last_hidden_state[0]
        every_token = plain.score(hidden).squeeze(-1)[sample.num_prompt_tokens :].numpy()
    assert len(result.step_ends) == 3
    np.testing.assert_allclose(result.token_values[result.step_ends], every_token[result.step_ends], atol=1e-5)


def test_a_function_gives_steps_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "steps.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str == 'bad':\n"
        "        return {'score': 1.0, 'steps': [1, 2]}\n"
        "    cut = solution_str.index(';') + 1\n"
        "    return {'score': 1.0, 'steps': [(cut, 0.25), (len(solution_str), -1)], 'accuracy': 1.0}\n"
    )
    options = FunctionOptions(path=f"{file}:compute_score", num_workers=1)
    reward = FunctionReward(options, context())
    reward.setup()
    try:
        sample = sampled("one; two")
        found, bad = asyncio.run(reward.score([sample, sampled("bad", index=1)]))
    finally:
        reward.close()
    assert pieces(sample, found) == [("one;", 0.25), (" two" + END, -1.0)]
    assert (found.value, found.components) == (1.0, {"accuracy": 1.0})
    assert "a step is (end, reward)" in (bad.error or "")


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([[4, 0.25], [8, 1]], None),
        ([[4, 0.25, 3]], "the server's steps are [[4, 0.25, 3]], not a list of [end, reward]"),
        ([[4, None]], "not a list of [end, reward]"),
        ([[40, 1.0]], "steps end at [40]; they must ascend from 1 to the 8 characters"),
    ],
)
def test_a_server_gives_steps(steps: Any, error: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def reply(body: Any, number: int) -> HttpReply:
        return HttpReply({"results": [{"id": row["id"], "score": 0.5, "steps": steps} for row in body["samples"]]})

    sample = sampled("one; two")
    with FakeHttpServer(reply) as server:
        reward = HttpReward(HttpOptions(url=server.url, batch_wait_s=0), context())
        reward.setup()
        [result] = asyncio.run(reward.score([sample]))
        reward.close()
    if error is not None:
        assert error in (result.error or "")
        return
    assert result.value == 0.5
    assert pieces(sample, result) == [("one;", 0.25), (" two" + END, 1.0)]
