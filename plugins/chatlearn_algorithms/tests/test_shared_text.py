"""Distillation from a teacher with another vocabulary: spans of text, and the advantages of the tokens in them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from chatlearn_algorithms import plugin
from chatlearn_algorithms.distillation import Distillation, span_means
from chatlearn_algorithms.distillation_options import DistillationOptions
from chatlearn_algorithms.shared_text import UNMATCHED, Span, matched_spans
from chatlearn_core.exceptions import DataError
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.flow import FlowVocabulary, trace
from chatlearn_core.metrics import Timers
from chatlearn_core.plugins.loader import load_plugins
from chatlearn_core.plugins.sources import PluginSource
from chatlearn_core.protocols import ModelSource
from chatlearn_core.protocols.data_store import PlainData
from chatlearn_core.runtime.boundary import Origin
from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    ExampleDraw,
    LogprobBasis,
    Prompt,
    Sample,
    SamplingParams,
    pack_samples,
    sample_from_completion,
)
from chatlearn_hf import plugin as hf_plugin
from chatlearn_hf.tiny import build_character_tokenizer, build_tiny_model, build_tiny_tokenizer
from chatlearn_testing.fakes.fleet_completions import FleetCompletions

REGISTRY = load_plugins(
    [
        PluginSource(name, f"chatlearn-{name}", "0", load=lambda module=module: module)
        for name, module in (("algorithms", plugin), ("hf", hf_plugin))
    ]
)
ROLES = {"generator": "generator", "trainer": "trainer", "teacher": "trainer"}
CORPUS = ["what is three plus four? seven it is"] * 9


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSource]:
    directory = tmp_path_factory.mktemp("models")
    made: dict[str, ModelSource] = {}
    characters = build_character_tokenizer()
    characters.chat_template = str(characters.chat_template).replace("assistant", "teacher")
    for name, tokenizer in (("student", build_tiny_tokenizer(400, CORPUS)), ("characters", characters)):
        path = build_tiny_model(directory / name, hidden=16, layers=1, heads=2, kv_heads=1, tokenizer=tokenizer)
        made[name] = ModelSource(str(path), str(path))
    return made


class Runtime:
    """A trainer whose logprob of a token is a function of the ids up to it."""

    data = PlainData()

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def trainer(self, role: str) -> Any:
        return self

    async def compute(self, batch: Any, request: Any) -> dict[str, torch.Tensor]:
        self.seen.append((batch, request))
        ids = batch.token_ids.double()
        return {"logprobs": torch.where(batch.loss_mask, -(1 + ids.sin().abs()), 0.0).float()}


def tokenizer_at(source: ModelSource) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(source.path)


def rollout(source: ModelSource, ids: list[int], name: str = "p", prompt: str = "three plus four?") -> Sample:
    tokenizer = tokenizer_at(source)
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    made = Prompt(name, np.array(tokenizer.encode(text, add_special_tokens=False)), text)
    token_ids, logprobs = np.array(ids, np.int64), np.zeros(len(ids), np.float32)
    sampling = SamplingParams(max_tokens=64)
    completion = Completion(name, token_ids, logprobs, RAW_BASIS, "stop", sampling, (), text="not read")
    return sample_from_completion(f"{name}@0#0", f"{name}@0", made, completion)


def taught(sources: dict[str, ModelSource], teacher: str, *samples: Sample, runtime: Any = None) -> Any:
    """Run ``text_logprobs`` of one teacher over the samples."""

    def flow(given: Any, m: Any) -> Any:
        return m.teacher.text_logprobs(given, student="trainer", temperature=0.7)

    graph = trace(flow, ROLES, given="demonstrations", vocabulary=FlowVocabulary.of(REGISTRY))
    roles = {
        name: SimpleNamespace(name=name, kind="trainer", model=sources[model], origin=Origin(name, "a trainer"))
        for name, model in (("trainer", "student"), ("teacher", teacher))
    }
    runtime = runtime or Runtime()
    plan = SimpleNamespace(roles=roles, registry=REGISTRY)
    requests = [RolloutRequest(one.id, ExampleDraw(one.prompt, 0, one.group_id), sample=one) for one in samples]
    asyncio.run(FlowScheduler(graph, runtime, FleetCompletions(runtime), plan=plan).run(requests, Timers()))  # type: ignore[arg-type]  # what is used
    return runtime


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.integers(0, 3), max_size=12),
    st.integers(0, 30),
)
def test_spans_by_a_loop_over_characters(student: list[int], teacher: list[int], shared: int) -> None:
    """Tokens of 0 to 3 characters on either side; 0: the first bytes of a character, or a control token."""
    ours, theirs = np.cumsum(student).tolist(), np.cumsum(teacher).tolist()
    expected: list[Span] = []
    begun, read = (0, 0), [0, 0]
    for character in range(1, shared + 1):
        ends = [False, False]
        for side, lengths in enumerate((ours, theirs)):
            while read[side] < len(lengths) and lengths[read[side]] < character:
                read[side] += 1
            if read[side] < len(lengths) and lengths[read[side]] == character:
                read[side] += 1
                ends[side] = True
        if all(ends):
            expected.append(Span(begun[0], read[0], begun[1], read[1]))
            begun = (read[0], read[1])
    assert matched_spans(ours, theirs, shared) == expected


def test_means_over_spans_by_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(9, generator=generator, dtype=torch.float64)
    spans, sequences = torch.tensor([0, 1, 1, -1, 2, 0, 1, 2, 2]), torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1])
    members: dict[tuple[int, int], list[int]] = {}
    for t in range(9):
        members.setdefault((int(sequences[t]), int(spans[t])), []).append(t)
    expected = [
        sum(float(values[k]) for k in members[int(sequences[t]), int(spans[t])])
        / len(members[int(sequences[t]), int(spans[t])])
        if spans[t] > 0
        else 0.0
        for t in range(9)
    ]
    torch.testing.assert_close(span_means(values, spans, sequences), torch.tensor(expected, dtype=torch.float64))


def test_a_teacher_with_the_students_tokens_gives_the_advantages_of_tokens(sources: Any, make_context: Any) -> None:
    tokenizer = tokenizer_at(sources["student"])
    samples = [
        rollout(sources["student"], tokenizer.encode("seven it is<|im_end|>"), "a"),
        rollout(sources["student"], tokenizer.encode("it is three ☃ 𝄞 plus"), "b"),
    ]
    runtime = taught(sources, "student", *samples)
    [(read, request)] = runtime.seen
    batch = pack_samples(samples)
    assert read.token_ids.tolist() == batch.token_ids.tolist()
    assert (request.names, request.temperature) == ({"logprobs"}, 0.7)
    context = make_context(LogprobBasis(temperature=0.7), teacher="trainer")
    by_text, by_tokens = (Distillation(DistillationOptions(match=one), context) for one in ("text", "tokens"))
    generator = torch.Generator().manual_seed(1)
    batch.token_data["trainer_logprobs"] = -torch.rand(batch.num_tokens, generator=generator)
    batch.token_data["teacher_logprobs"] = asyncio.run(Runtime().compute(batch, None))["logprobs"]
    found, wanted = by_text.advantages(batch, 1), by_tokens.advantages(batch, 1)
    assert batch.loss_mask.sum() == sum(sample.num_completion_tokens for sample in samples)
    # A character of several tokens is one span: within it only the sum is the same.
    spans = batch.token_data["teacher_text_spans"]
    sizes = torch.bincount(spans[batch.sequence_index == 1].clamp(min=0))
    alone = torch.tensor([s == 0 or q == 0 or sizes[s] == 1 for s, q in zip(spans, batch.sequence_index, strict=True)])
    assert sorted(set(sizes[1:].tolist())) == [1, 3, 4]
    assert torch.equal(found.token_data["advantages"][alone], wanted.token_data["advantages"][alone])
    for name in ("distillation/reverse_kl",):
        assert found.metrics[name].value == pytest.approx(wanted.metrics[name].value, rel=1e-6)
    assert found.metrics["distillation/unmatched_tokens"].value == 0


def test_a_teacher_of_characters_sums_over_the_students_tokens(sources: Any) -> None:
    """The whole text is shared: each of the student's tokens is a span of as many teacher tokens as it has letters."""
    tokenizer, letters = (tokenizer_at(sources[name]) for name in ("student", "characters"))
    ids = tokenizer.encode("three plus four<|im_end|>")
    sample = rollout(sources["student"], ids)
    runtime = taught(sources, "characters", sample)
    [(read, _)] = runtime.seen
    prompt = "<|im_start|>user\nthree plus four?<|im_end|>\n<|im_start|>teacher\n"
    assert read.token_ids.tolist() == letters.encode(prompt + "three plus four<|im_end|>")
    assert len(read.token_ids) > 2 * len(ids), "the teacher's tokens are others"
    of_letter = {letter: -(1 + abs(np.sin(letters.convert_tokens_to_ids(letter)))) for letter in "threplusfo "}
    expected = [sum(of_letter[letter] for letter in tokenizer.decode([token])) for token in ids[:-1]]
    expected.append(-(1 + abs(np.sin(letters.eos_token_id))))
    start = sample.num_prompt_tokens
    np.testing.assert_allclose(sample.token_data["teacher_text_logprobs"][start:], expected, rtol=1e-6)
    assert sample.token_data["teacher_text_spans"].tolist() == [0] * start + list(range(1, len(ids) + 1))


def test_what_the_teacher_does_not_write_is_masked_and_samples_without_a_span_are_left_out(sources: Any) -> None:
    tokenizer = tokenizer_at(sources["student"])
    control = tokenizer.convert_tokens_to_ids("<|im_start|>")
    cut = tokenizer.encode("is ☃ three<|im_end|>")  # the teacher writes <unk> for the snowman
    broken = [*tokenizer.encode("is"), control, *tokenizer.encode("it")]
    nothing = rollout(sources["student"], tokenizer.encode("☃"), "c")
    long = rollout(sources["student"], tokenizer.encode("three " * 90), "d")
    samples = [rollout(sources["student"], cut, "a"), rollout(sources["student"], broken, "b"), nothing, long]
    taught(sources, "characters", *samples)
    first, second, third, fourth = samples
    start = first.num_prompt_tokens
    shared = len(tokenizer.encode("is "))
    assert first.loss_mask.tolist() == [False] * start + [True] * shared + [False] * (len(cut) - shared)
    assert first.token_data["teacher_text_spans"][start + shared :].tolist() == [UNMATCHED] * (len(cut) - shared)
    # The control token and the letter behind it are one span, which the teacher's letter alone does not match.
    before = len(tokenizer.encode("is"))
    matched = [True] * before + [False] * 2 + [True] * (len(broken) - before - 2)
    assert second.loss_mask[start:].tolist() == matched
    assert (third.exclusion, third.loss_mask.any()) == ("no_shared_text", False)
    assert fourth.exclusion is not None
    assert fourth.exclusion.startswith("unreadable_for_teacher: teacher: it has 5")
    assert all("teacher_text_logprobs" in sample.token_data for sample in samples), "later calls pack them together"


def test_several_turns_are_refused(sources: Any) -> None:
    sample = rollout(sources["student"], [10, 11])
    sample.turns = (*sample.turns, *sample.turns)
    with pytest.raises(DataError, match=r"teacher\.text_logprobs takes completions of one turn.* has 2"):
        taught(sources, "characters", sample)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "forward_kl"}, "set divergence to sampled_reverse_kl, or match to tokens"),
        ({"roles": {"environment": "game"}}, "remove roles.environment, or set match to tokens"),
    ],
)
def test_options_that_text_does_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillationOptions(match="text", **options)
