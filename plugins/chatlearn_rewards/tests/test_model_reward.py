"""The reward model: its scores are those of transformers, whatever else is scored at the time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from chatlearn_core.exceptions import ConfigError, DataError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.runtime.plan import UsedRole
from chatlearn_core.types import RewardResult, Sample
from chatlearn_rewards.model_options import ModelOptions
from chatlearn_rewards.model_reward import ModelReward
from chatlearn_runtime_kit.role_handles import Handle
from chatlearn_testing.fakes.role_handle import ScriptedHandle


def scored(
    handle: Any, samples: list[Sample], context: dict[str, Any] | None = None, **options: Any
) -> list[RewardResult]:
    reward = ModelReward(ModelOptions(**options), RoleContext("reward", handles={"model": handle}, **(context or {})))
    reward.setup()
    return asyncio.run(reward.score(samples))


def test_every_group_is_a_call_of_its_own(make_sample: Any) -> None:
    handle = ScriptedHandle(scores=lambda ids: float(sum(ids)))
    samples = [make_sample("a", index=index) for index in (0, 1, 0, 2)]
    for number, sample in enumerate(samples):
        sample.id = f"{sample.id}.{number}"
    results = scored(handle, samples)
    assert [result.value for result in results] == [15.0] * 4  # 1 + 2 + 3 + 4 + 5
    assert sorted(handle.batches) == [("p0@0#0.0", "p0@0#0.2"), ("p1@0#0.1",), ("p2@0#0.3",)]


def test_text_is_rendered_anew_for_a_model_with_another_tokenizer(make_sample: Any) -> None:
    seen: list[str] = []

    def score(ids: list[int]) -> float:
        seen.append("".join(map(chr, ids)))
        return 0.5

    scored(ScriptedHandle(scores=score), [make_sample("It is 3")], input="text")
    assert seen == ["[user]What is it?[assistant]It is 3"]


def test_a_prompt_without_messages_needs_the_tokenizer_of_the_run(make_sample: Any) -> None:
    sample = make_sample("It is 3")
    sample.prompt = replace(sample.prompt, messages=())
    with pytest.raises(DataError, match=r"reward 'model' of role 'reward' needs the tokenizer .* prompt 'p0'"):
        scored(ScriptedHandle(scores=lambda ids: 0.5), [sample], input="text")


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({}, 3.0),
        ({"mean": 1.0, "std": 4.0}, 0.5),
        ({"scale": 2.0}, 6.0),
        ({"transform": "sigmoid"}, 1 / (1 + math.exp(-3.0))),
        ({"scale": 2.0, "clip": 5.0}, 5.0),
        ({"scale": -2.0, "clip": 5.0}, -5.0),
    ],
)
def test_the_score_becomes_a_reward(options: Any, value: float, make_sample: Any) -> None:
    [result] = scored(ScriptedHandle(scores=lambda ids: 3.0), [make_sample("a")], **options)
    assert result.value == pytest.approx(value)
    assert result.components == {"score": 3.0}


def test_a_generator_weighs_labels_by_their_probability(make_sample: Any) -> None:
    def logprobs(prompt: str, label: str) -> list[float]:
        assert prompt == "[user]Right? It is 3[assistant]"
        return {"Yes": [-1.0, -0.5, 0.0], "No": [-2.0, -0.5]}[label]

    options = {"question": "Right? {completion}", "labels": {"Yes": 10.0, "No": 0.0}}
    [result] = scored(ScriptedHandle(logprobs=logprobs), [make_sample("It is 3")], **options)
    yes, no = math.exp(-1.5), math.exp(-2.5)
    assert result.value == pytest.approx(10.0 * yes / (yes + no), rel=1e-6)


def test_a_generator_that_classifies_gives_its_score(make_sample: Any) -> None:
    seen: list[str] = []

    def classify(ids: list[int]) -> float:
        seen.append("".join(map(chr, ids)))
        return 3.0

    handle = ScriptedHandle(classify=classify)
    [result] = scored(handle, [make_sample("It is 3")], input="text", scale=2.0)
    assert (result.value, result.components) == (6.0, {"score": 3.0})
    assert seen == ["[user]What is it?[assistant]It is 3"]
    with pytest.raises(ConfigError, match="role 'scripted' serves a sequence classifier, whose score is the reward"):
        scored(handle, [], question="{completion}?")


def test_without_a_question_it_is_the_mean_logprob_of_what_was_sampled(make_sample: Any) -> None:
    sample = make_sample("a")
    sample.loss_mask = np.array([False, False, True, False, True])  # the token between was observed
    [result] = scored(ScriptedHandle(logprobs=lambda prompt, tokens: [-1.0, -9.0, -2.0]), [sample])
    assert result.value == pytest.approx(-1.5)


def test_what_cannot_be_shown_is_an_error_of_its_sample(make_sample: Any) -> None:
    long, short = make_sample("a"), make_sample("b")
    long.token_ids = np.ones(20_001, np.int64)
    results = scored(ScriptedHandle(scores=lambda ids: math.nan if ids[0] == 9 else 1.0), [long, short])
    assert "20001 tokens, and role 'scripted' takes 20000" in (results[0].error or "")
    assert results[1].value == 1.0
    short.token_ids = np.array([9, 9, 9])
    [result] = scored(ScriptedHandle(scores=lambda ids: math.nan), [short])
    assert result.error == "sample 'p0@0#0': the score of role 'scripted' is nan"


def test_a_question_is_for_generators(make_sample: Any) -> None:
    with pytest.raises(ConfigError, match="question is for a generator role"):
        scored(ScriptedHandle(scores=lambda ids: 1.0), [], question="{completion}?")
    with pytest.raises(ConfigError, match=r"set uses: \{model: <trainer or generator role>\}"):
        ModelReward(ModelOptions(), RoleContext("reward"))
    for options, problem in (
        ({"labels": {"Yes": 1.0, "No": 0.0}}, "question, but question is not set"),
        ({"question": "{completion}", "labels": {"Yes": 1.0}}, "two or more"),
        ({"question": "{answer}"}, "question has {answer}"),
    ):
        with pytest.raises(ValidationError, match=problem):
            ModelOptions(**options)


@pytest.mark.engine
def test_scores_are_those_of_transformers(make_sample: Any, tmp_path: Path) -> None:
    """A plain forward of AutoModelForSequenceClassification, one sample at a time, in float32."""
    directory = reward_model(tmp_path, RUN_TEMPLATE)
    samples = [make_sample(f"It is {index}" * (index + 1), index=index // 2) for index in range(4)]
    generator = np.random.default_rng(0)
    for number, sample in enumerate(samples):
        sample.id = f"{sample.id}.{number}"
        sample.token_ids = generator.integers(10, 200, 5 + 3 * number)
        sample.loss_mask = np.arange(len(sample.token_ids)) >= 2
    with trainer_role(directory) as handle:
        results = scored(handle, samples)
    for sample, result in zip(samples, results, strict=True):
        assert result.value == pytest.approx(transformers_score(directory, sample.token_ids.tolist()), abs=1e-4)


RUN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role | upper }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>ASSISTANT: {% endif %}"
)
CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"})
RENDERED = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
PLAIN = "2 + 2 ="
EXPECTED_TEXTS = {
    "messages": (
        "<|im_start|>SYSTEM: Be brief.<|im_end|><|im_start|>USER: What is 2 + 2?<|im_end|>"
        "<|im_start|>ASSISTANT: It is 4<|im_end|>",
        "Be brief.\n\nWhat is 2 + 2?\n\nIt is 4<|im_end|>",
    ),
    "text that the chat template rendered": (
        "<|im_start|>USER: What is 2 + 2?<|im_end|><|im_start|>ASSISTANT: It is 4<|im_end|>",
        "What is 2 + 2?\n\nIt is 4<|im_end|>",
    ),
    "text without a template": (
        "<|im_start|>USER: 2 + 2 =<|im_end|><|im_start|>ASSISTANT: It is 4<|im_end|>",
        "2 + 2 =It is 4<|im_end|>",
    ),
}
"""Kind of prompt -> what a reward model with a chat template reads, and one without."""


@pytest.mark.engine
@pytest.mark.parametrize("template", [MODEL_TEMPLATE, None], ids=["with a template", "without a template"])
def test_text_is_rendered_once_whatever_the_prompt_was(template: str | None, make_sample: Any, tmp_path: Path) -> None:
    """Scores equal those of transformers for the text as a user would write it for that model."""
    from transformers import AutoTokenizer

    directory = reward_model(tmp_path, template)
    run_tokenizer = AutoTokenizer.from_pretrained(directory)
    run_tokenizer.chat_template = RUN_TEMPLATE
    given = {
        "messages": ("not read", CHAT),
        "text that the chat template rendered": (RENDERED, ()),
        "text without a template": (PLAIN, ()),
    }
    samples = []
    for index, (text, messages) in enumerate(given.values()):
        sample = make_sample("It is 4", index=index)
        sample.prompt = replace(sample.prompt, text=text, messages=messages)
        samples.append(sample)
    context = {"load_tokenizer": lambda: run_tokenizer}
    with trainer_role(directory) as handle:
        results = scored(handle, samples, context, input="text")
        tokenizer = handle.tokenizer
    found = {kind: result.value for kind, result in zip(given, results, strict=True)}
    for kind, texts in EXPECTED_TEXTS.items():
        ids = tokenizer.encode(texts[template is None], add_special_tokens=False)
        assert ids[-1] == tokenizer.eos_token_id
        assert found[kind] == pytest.approx(transformers_score(directory, ids), abs=1e-4), kind
    assert len(set(found.values())) == len(found), "the score depends on the text"


def reward_model(folder: Path, template: str | None) -> Path:
    """A tiny sequence classifier whose tokenizer has this chat template."""
    from chatlearn_hf.tiny import build_tiny_classifier, build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = template
    return build_tiny_classifier(folder, hidden=32, intermediate=64, tie=False, tokenizer=tokenizer)


@contextmanager
def trainer_role(directory: Path) -> Iterator[Handle]:
    """The handle of a reward model on the trainer ``fsdp``."""
    registry = discover_plugins()
    source = ModelSource(str(directory), str(directory), head="reward")
    record = registry.select("trainer", "fsdp", "test")
    trainer = registry.load_factory(record)(registry.load_options(record)(), RoleContext("rm", source, device="cpu"))
    trainer.setup()

    async def ask(role: str, asked: Any) -> Any:
        return trainer.compute(asked.batch, asked.request)

    try:
        yield Handle("reward", UsedRole("rm", "trainer", source, weights_change=False), registry, ask)
    finally:
        trainer.close()


def transformers_score(directory: Path, ids: list[int]) -> float:
    """Of one sequence."""
    import torch

    from chatlearn_hf.plain_forward import load_plain_classifier

    with torch.no_grad():
        return float(load_plain_classifier(directory)(torch.tensor(ids)))


def test_options_survive_the_way_to_a_worker() -> None:
    for options in (ModelOptions(), ModelOptions(question="{completion}?"), ModelOptions(input="text", clip=2.0)):
        assert ModelOptions(**options.model_dump()) == options
