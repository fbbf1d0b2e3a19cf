"""The decode loop against plain transformers, through the generator that drives it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.engine

FAMILIES = ["qwen3", "qwen2", "llama", "qwen3_moe"]


async def sample_all(generator, requests):
    return await asyncio.gather(*(generator.generate(request) for request in requests))


def same(left, right):
    assert left.token_ids.tolist() == right.token_ids.tolist()
    np.testing.assert_allclose(left.logprobs, right.logprobs, atol=2e-4)
    np.testing.assert_allclose(left.raw_logprobs, right.raw_logprobs, atol=2e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_equals_transformers_generate(
    family, attention, model_dir, make_generator, load_model, random_prompts, ask
):
    directory = model_dir(family)
    prompts = random_prompts(7)
    generator = make_generator(directory, attention=attention, max_num_sequences=4)
    found = await sample_all(
        generator,
        [ask(str(i), p, temperature=0.0, max_tokens=5 + 3 * i, ignore_eos=False) for i, p in enumerate(prompts)],
    )
    model = load_model(directory)
    distinct = set()
    for index, (prompt, completion) in enumerate(zip(prompts, found, strict=True)):
        expected = model.generate(
            input_ids=torch.from_numpy(prompt)[None], do_sample=False, max_new_tokens=5 + 3 * index, pad_token_id=0
        )[0, len(prompt) :]
        assert completion.token_ids.tolist() == expected.tolist()
        distinct.update(expected.tolist())
    assert len(distinct) > 20, "the random model repeats itself, so this test shows little"


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"temperature": 1.4, "top_k": 11}, {"temperature": 0.8, "top_p": 0.7, "top_k": 30}],
    ids=str,
)
async def test_logprobs_equal_a_plain_forward(
    sampling, model_dir, make_generator, load_model, random_prompts, ask, plain_logits
):
    prompts = random_prompts(6, seed=3)
    found = await sample_all(make_generator(), [ask(str(i), p, seed=i, **sampling) for i, p in enumerate(prompts)])
    model = load_model(model_dir())
    for prompt, completion in zip(prompts, found, strict=True):
        logits = plain_logits(model, prompt, completion.token_ids).double()
        tokens = torch.from_numpy(completion.token_ids)[:, None]
        raw = logits.log_softmax(-1).gather(-1, tokens)[:, 0]
        np.testing.assert_allclose(completion.raw_logprobs, raw, atol=1e-4)
        scaled = logits / sampling.get("temperature", 1.0)
        if top_k := sampling.get("top_k"):
            scaled[scaled < scaled.topk(top_k).values[:, -1:]] = -torch.inf
        ranked, order = scaled.softmax(-1).sort(descending=True)
        outside = torch.zeros_like(scaled, dtype=torch.bool)
        outside.scatter_(-1, order, ranked.cumsum(-1) - ranked >= sampling.get("top_p", 1.0))
        expected = scaled.masked_fill(outside, -torch.inf).log_softmax(-1).gather(-1, tokens)[:, 0]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert completion.basis == completion.sampling.basis
        assert completion.logprobs.dtype == np.float32


async def test_a_request_does_not_depend_on_its_batch(make_generator, random_prompts, ask):
    requests = [
        ask(str(i), p, seed=i, max_tokens=4 + i, temperature=(0.0, 1.0, 0.6)[i % 3], top_k=(0, 9)[i % 2])
        for i, p in enumerate(random_prompts(9, seed=5))
    ]
    together = await sample_all(make_generator(), requests)
    few_slots = await sample_all(make_generator(max_num_sequences=2, max_prefill_tokens=8), requests)
    generator = make_generator()
    alone = [await generator.generate(request) for request in requests]
    for one, two, three in zip(together, few_slots, alone, strict=True):
        same(one, two)
        same(one, three)


async def test_runs_are_bit_identical(make_generator, random_prompts, ask):
    requests = [ask(str(i), p, seed=i, max_tokens=3 + i) for i, p in enumerate(random_prompts(12, seed=6))]
    first = await sample_all(make_generator(max_num_sequences=8), requests)
    second = await sample_all(make_generator(max_num_sequences=8), requests)
    for one, two in zip(first, second, strict=True):
        assert one.token_ids.tobytes() == two.token_ids.tobytes()
        assert one.logprobs.tobytes() == two.logprobs.tobytes()


async def test_shared_prefixes_change_nothing_and_are_counted(make_generator, random_prompts, ask):
    prompts = [prompt for prompt in random_prompts(3, seed=8, shortest=6) for _ in range(4)]
    requests = [ask(str(i), p, seed=i) for i, p in enumerate(prompts)]
    shared = await sample_all(make_generator(), requests)
    apart = await sample_all(make_generator(share_prefixes=False), requests)
    for one, two in zip(shared, apart, strict=True):
        same(one, two)
    assert [c.num_cached_tokens for c in shared] == [0 if i % 4 == 0 else len(p) for i, p in enumerate(prompts)]
    assert not any(c.num_cached_tokens for c in apart)
    assert len({c.token_ids.tobytes() for c in shared}) == len(requests), "seeds make completions of a group differ"


async def test_kv_memory_bounds_admission(make_generator, random_prompts, ask):
    generator = make_generator(max_kv_cache_gb=2 * 32 * 512 / 2**30)  # two sequences of 32 tokens, 512 bytes a token
    assert generator._decoder.kv_bytes_per_token == 512
    requests = [ask(str(i), p, seed=i) for i, p in enumerate(random_prompts(5, seed=9, shortest=20))]
    widest = 0
    step = generator._scheduler.step

    def watched():
        nonlocal widest
        report = step()
        widest = max(widest, generator._scheduler.num_running)
        return report

    generator._scheduler.step = watched
    found = await sample_all(generator, requests)
    assert widest == 2
    for one, two in zip(found, await sample_all(make_generator(), requests), strict=True):
        same(one, two)


async def test_stops(make_generator, random_prompts, ask):
    generator = make_generator()
    prompt = random_prompts(1, seed=11)[0]
    whole = await generator.generate(ask("whole", prompt, temperature=0.0, max_tokens=16))
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 16)
    ids = whole.token_ids.tolist()

    third = ids[3]
    by_id = await generator.generate(ask("id", prompt, temperature=0.0, max_tokens=16, stop_token_ids=(299, third)))
    assert by_id.finish_reason == "stop"
    assert by_id.token_ids.tolist() == ids[: ids.index(third) + 1]

    text = generator._tokenizer.decode(ids[4:6], skip_special_tokens=False)
    by_text = await generator.generate(ask("text", prompt, temperature=0.0, max_tokens=16, stop=("never", text)))
    assert by_text.finish_reason == "stop"
    decoded = [generator._tokenizer.decode(ids[:n], skip_special_tokens=False) for n in range(1, 17)]
    assert len(by_text.token_ids) == next(n for n, d in enumerate(decoded, 1) if text in d)
    assert by_text.text == generator._tokenizer.decode(by_text.token_ids, skip_special_tokens=True)


async def test_end_of_sequence_ends_unless_ignored(model_dir, make_generator, ask):
    generator = make_generator()
    eos = generator._tokenizer.eos_token_id

    def requests(**more):
        return [ask(str(i), np.array([5, 6, 7]), seed=i, temperature=8.0, max_tokens=100, **more) for i in range(24)]

    ignored = await sample_all(generator, requests())
    stopped = await sample_all(generator, requests(ignore_eos=False))
    assert any(eos in c.token_ids for c in ignored), "no end of sequence was drawn, so this test shows nothing"
    for one, two in zip(ignored, stopped, strict=True):
        ids = one.token_ids.tolist()
        cut = ids.index(eos) + 1 if eos in ids else 100
        assert two.token_ids.tolist() == ids[:cut]
        assert two.finish_reason == ("stop" if eos in ids else "length")
        assert one.finish_reason == "length"


async def test_logits_that_are_not_finite_kill_the_replica(make_generator, ask):
    generator = make_generator()
    generator._decoder.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(Exception, match=r"request 'a' failed: .*logits are not finite for 'a' \(policy version 0\)"):
        await generator.generate(ask("a", np.array([5, 6])))
    assert generator.state == "dead"
