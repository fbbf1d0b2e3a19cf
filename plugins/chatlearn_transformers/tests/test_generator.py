"""Requests, control and failure: everything a caller of the protocol sees."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ConfigError, ModelError
from chatlearn_core.protocols.generator import Generator, WeightLoader
from chatlearn_core.protocols.lifecycle import RoleContext
from chatlearn_core.runtime.boundary import Origin, check_completion
from chatlearn_core.types import VersionSpan
from chatlearn_transformers.generator import TransformersGenerator
from chatlearn_transformers.options import TransformersGeneratorOptions

pytestmark = pytest.mark.engine

PROMPT = np.array([11, 12, 13, 14])


def start(generator, *requests):
    return [asyncio.create_task(generator.generate(request)) for request in requests]


async def let_run(generator, num_steps):
    """Return while the generator is paused after at least this many steps from now."""
    done, step = 0, generator._scheduler.step

    def counted():
        nonlocal done
        report = step()
        done += 1
        if done >= num_steps:
            generator._paused = True
        return report

    generator._scheduler.step = counted
    while done < num_steps:
        await asyncio.sleep(0.001)
    generator._scheduler.step = step
    await generator.pause()


def same(left, right):
    assert left.token_ids.tolist() == right.token_ids.tolist()
    np.testing.assert_allclose(left.logprobs, right.logprobs, atol=2e-4)
    np.testing.assert_allclose(left.raw_logprobs, right.raw_logprobs, atol=2e-4)


def test_is_a_generator(make_generator):
    generator = make_generator()
    assert isinstance(generator, Generator)
    assert isinstance(generator.loader, WeightLoader)
    assert (generator.policy_version, generator.state, generator.health()) == (0, "serving", None)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.8}], ids=str)
async def test_abort_and_resume_equal_an_undisturbed_run(sampling, make_generator, ask):
    generator = make_generator()
    requests = [ask(str(i), PROMPT[: 1 + i], seed=i, **sampling) for i in range(4)]
    undisturbed = await asyncio.gather(*start(generator, *requests))
    tasks = start(generator, *requests)
    await asyncio.sleep(0)
    await let_run(generator, 5)
    await generator.abort(["0", "2", "unknown"])
    await generator.resume()
    partials = [await tasks[0], await tasks[2]]
    for partial in partials:
        assert (partial.finish_reason, len(partial.token_ids)) == ("abort", 5)
        assert partial.version_spans == (VersionSpan(0, 5, 0),)
    same(await tasks[1], undisturbed[1])
    same(await tasks[3], undisturbed[3])
    for index, partial in zip((0, 2), partials, strict=True):
        resumed = await generator.generate(
            ask(f"again {index}", PROMPT[: 1 + index], seed=index, resume_from=partial, **sampling)
        )
        same(resumed, undisturbed[index])
        assert resumed.finish_reason == "length"
        assert resumed.version_spans == (VersionSpan(0, 12, 0),)


async def test_waiting_requests_can_be_aborted(make_generator, ask):
    generator = make_generator(max_num_sequences=1)
    tasks = start(generator, *(ask(str(i), PROMPT) for i in range(3)))
    await asyncio.sleep(0)
    await let_run(generator, 2)
    await generator.abort()
    first, second, third = await asyncio.gather(*tasks)
    assert [len(c.token_ids) for c in (first, second, third)] == [2, 0, 0]
    assert {c.finish_reason for c in (first, second, third)} == {"abort"}
    assert second.version_spans == ()
    await generator.resume()
    resumed = await generator.generate(ask("again", PROMPT, resume_from=second))
    same(resumed, await generator.generate(ask("fresh", PROMPT)))


async def test_kept_requests_continue_after_a_pause(make_generator, ask):
    generator = make_generator()
    undisturbed = await generator.generate(ask("a", PROMPT, seed=3))
    (task,) = start(generator, ask("b", PROMPT, seed=3))
    await asyncio.sleep(0)
    await let_run(generator, 4)
    (late,) = start(generator, ask("c", PROMPT, seed=3))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not task.done()
    assert not late.done(), "a request that arrives while paused waits"
    assert generator._scheduler.num_running == 1
    await generator.resume()
    same(await task, undisturbed)
    same(await late, undisturbed)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.7}], ids=str)
async def test_scoring_gives_the_logprobs_that_sampling_gave(sampling, make_generator, ask):
    """Tokens that it sampled itself, and tokens that it did not, against its own forward."""
    generator = make_generator()
    sampled = await generator.generate(ask("a", PROMPT, seed=3, **sampling))
    (other,) = start(generator, ask("b", PROMPT, seed=4))
    request = replace(ask("c", PROMPT, **sampling), forced_ids=sampled.token_ids)
    scored = await generator.generate(request)
    same(scored, sampled)
    check_completion(scored, request, Origin("generator", "transformers"))
    assert (scored.finish_reason, scored.text, scored.version_spans) == (
        "stop",
        sampled.text,
        (VersionSpan(0, len(sampled.token_ids), 0),),
    )
    foreign = np.array([3, 1, 4, 1, 5])
    scored = await generator.generate(replace(request, forced_ids=foreign))
    with torch.inference_mode():
        logits = generator._decoder.own_logits(np.concatenate([PROMPT, foreign]), len(PROMPT) - 1)[:-1]
    expected = torch.log_softmax(logits / (sampling.get("temperature") or 1.0), -1)
    expected = expected.gather(-1, torch.from_numpy(foreign)[:, None]).squeeze(-1)
    np.testing.assert_allclose(scored.logprobs, expected.numpy(), atol=1e-4)
    await other


async def test_scoring_waits_while_the_replica_is_paused(make_generator, ask):
    generator = make_generator()
    await generator.pause()
    request = replace(ask("a", PROMPT), forced_ids=np.array([3, 1]))
    (task,) = start(generator, request)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not task.done()
    with pytest.raises(BackendTimeoutError, match=r"request 'b' .* had no answer within 0.01 s"):
        await generator.generate(replace(request, id="b", timeout_s=0.01))
    await generator.resume()
    assert len((await task).logprobs) == 2


async def test_scoring_under_a_cut_distribution_is_refused(make_generator, ask):
    generator = make_generator()
    with pytest.raises(BackendError, match=r"top_p 0.8 and top_k 0 cut the distribution"):
        await generator.generate(replace(ask("a", PROMPT, top_p=0.8), forced_ids=np.array([3, 1])))


async def test_streaming_grows_to_the_whole(make_generator, ask):
    generator = make_generator()
    whole = await generator.generate(ask("a", PROMPT, seed=1))
    seen: list[int] = []

    def take(at, tokens):
        assert at == len(seen)
        seen.extend(tokens)

    await asyncio.gather(generator.generate(ask("b", PROMPT, seed=1), take), generator.generate(ask("c", PROMPT)))
    assert seen == whole.token_ids.tolist()


async def test_a_callback_that_raises_fails_its_request_alone(make_generator, ask):
    generator = make_generator()

    def broken(at, tokens):
        raise RuntimeError("no")

    (other,) = start(generator, ask("b", PROMPT))
    with pytest.raises(BackendError, match="request 'a': on_tokens raised RuntimeError: no"):
        await generator.generate(ask("a", PROMPT), broken)
    assert (await other).finish_reason == "length"


async def test_timeout_names_request_and_role(make_generator, ask):
    generator = make_generator()
    await generator.pause()
    with pytest.raises(BackendTimeoutError, match=r"role 'generator' .*request 'slow' .* no answer within 0.01 s"):
        await generator.generate(ask("slow", PROMPT, timeout_s=0.01))
    await generator.resume()
    await generator.generate(ask("b", PROMPT))
    assert not generator._pending


async def test_a_cancelled_request_frees_its_slot(make_generator, ask):
    generator = make_generator()
    tasks = start(generator, ask("a", PROMPT, max_tokens=100), ask("b", PROMPT, max_tokens=60))
    await asyncio.sleep(0)
    await let_run(generator, 3)
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    await generator.resume()
    await let_run(generator, 1)
    assert generator._scheduler.num_running == 1
    await generator.resume()
    assert len((await tasks[1]).token_ids) == 60


async def test_a_failing_forward_fails_every_request_with_its_cause(make_generator, ask):
    generator = make_generator(max_num_sequences=1)

    def broken(*args):
        raise torch.OutOfMemoryError("no memory left")

    generator._decoder.prefill = broken
    results = await asyncio.gather(*start(generator, ask("a", PROMPT), ask("b", PROMPT)), return_exceptions=True)
    for name, error in zip("ab", results, strict=True):
        assert isinstance(error, BackendError)
        assert f"request '{name}' failed: generating failed: OutOfMemoryError: no memory left" in str(error)
        assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert generator.state == "dead"
    assert "no memory left" in generator.health()
    with pytest.raises(BackendError, match=r"is dead and cannot take request 'c'.*restart it"):
        await generator.generate(ask("c", PROMPT))


async def test_close_fails_pending_requests_and_may_be_repeated(make_generator, ask):
    generator = make_generator()
    tasks = start(generator, ask("a", PROMPT), ask("b", PROMPT))
    await asyncio.sleep(0)
    await generator.pause()
    generator.close()
    generator.close()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, BackendError)
        assert "the generator was closed" in str(error)


async def test_requests_of_one_turn_start_together_in_order(make_generator, ask):
    generator = make_generator(max_num_sequences=2)
    started: list[list[str]] = []
    admit = generator._scheduler._admit

    def watched():
        admitted = admit()
        if admitted:
            started.append([pending_request.request.id for pending_request in admitted])
        return admitted

    generator._scheduler._admit = watched
    await asyncio.gather(*start(generator, *(ask(str(i), PROMPT) for i in range(5))))
    assert started == [["0", "1"], ["2", "3"], ["4"]]


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "request 'x': the prompt is empty"),
        ([1] * 40, {}, r"prompt has 40 tokens, but the model takes 40.*data.max_prompt_tokens"),
        (
            [1] * 30,
            {"max_tokens": 11},
            r"30 tokens and max_tokens 11 add up to 41, but the model takes 40.*to 10 or less",
        ),
        ([1, 10**6], {}, "prompt token 1000000 is outside the model's vocabulary"),
        ([-1], {}, "prompt token -1 is outside"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused(prompt, sampling, message, make_generator, ask):
    generator = make_generator(max_length=40)
    with pytest.raises(BackendError, match=message):
        await generator.generate(ask("x", np.array(prompt, dtype=np.int64), **sampling))
    assert (await generator.generate(ask("y", PROMPT))).finish_reason == "length"


async def test_resuming_an_incompatible_completion_is_refused(make_generator, ask):
    generator = make_generator()
    whole = await generator.generate(ask("a", PROMPT))
    with pytest.raises(BackendError, match=r"basis raw with sampling of basis processed\(temperature=0.5"):
        await generator.generate(ask("b", PROMPT, resume_from=whole, temperature=0.5))
    with pytest.raises(BackendError, match="completion of 12 tokens, but max_tokens 5"):
        await generator.generate(ask("b", PROMPT, resume_from=whole, max_tokens=5))
    full = await generator.generate(ask("b", PROMPT, resume_from=whole))
    same(full, whole)
    longer = await generator.generate(ask("b", PROMPT, resume_from=whole, max_tokens=20))
    same(longer, await generator.generate(ask("c", PROMPT, max_tokens=20)))


async def test_offload_moves_weights_aside_and_back(make_generator, ask):
    generator = make_generator()
    before = await generator.generate(ask("a", PROMPT))
    (kept,) = start(generator, ask("kept", PROMPT))
    await asyncio.sleep(0)
    await let_run(generator, 4)
    generator.offload({"weights", "kv_cache", "optimizer"})
    assert sum(p.numel() for p in generator._decoder.model.parameters()) == 0
    assert generator._decoder.cache.num_bytes == 0
    with pytest.raises(BackendError, match="has 'weights' offloaded; onload it"):
        await generator.resume()
    generator.onload({"weights"})
    with pytest.raises(BackendError, match="has 'kv_cache' offloaded; onload it"):
        await generator.resume()
    generator.onload({"kv_cache"})
    await generator.resume()
    same(await kept, before)
    generator.offload({"weights"})
    with pytest.raises(BackendError, match="has 'weights' offloaded"):
        await generator.generate(ask("b", PROMPT))


async def test_offload_while_generating_is_refused(make_generator, ask):
    generator = make_generator()
    (task,) = start(generator, ask("a", PROMPT))
    await asyncio.sleep(0)
    with pytest.raises(BackendError, match="is generating; pause it"):
        generator.offload({"weights"})
    await task


def test_setup_says_what_is_wrong(tmp_path, make_generator):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        make_generator(tmp_path)
    with pytest.raises(BackendError, match=r"has no model; set model\.path"):
        TransformersGenerator(TransformersGeneratorOptions(), RoleContext("generator")).setup()
    with pytest.raises(ConfigError, match=r"attn_implementation: owned by the backend; set options\.attention"):
        make_generator(engine={"attn_implementation": "sdpa"})


def test_close_before_setup_is_fine():
    TransformersGenerator(TransformersGeneratorOptions(), RoleContext("generator")).close()


async def test_the_ids_that_tokens_were_sampled_from(make_generator, ask, load_model, model_dir, plain_logits):
    """Against top-k, then top-p, of a plain forward; a greedy request beside it keeps its own tokens."""
    generator = make_generator()
    cut = {"temperature": 0.9, "top_k": 6, "top_p": 0.7, "max_kept_ids": 8}
    asked = ask("cut", PROMPT, seed=3, **cut)
    greedy = ask("greedy", PROMPT, temperature=0.0, max_kept_ids=8)
    plain = ask("plain", PROMPT, seed=3, top_k=6)
    tasks = start(generator, asked, greedy, plain)
    await asyncio.sleep(0)
    await let_run(generator, 5)
    await generator.abort(["cut"])
    await generator.resume()
    partial, of_greedy, of_plain = await asyncio.gather(*tasks)
    whole = await generator.generate(replace(asked, id="again", resume_from=partial))
    kept = whole.token_data["kept_ids"]
    assert (kept.shape, kept.dtype) == ((12, 8), np.int32)
    assert (partial.token_data["kept_ids"] == kept[:5]).all()
    logits = plain_logits(load_model(model_dir()), PROMPT, whole.token_ids).double() / 0.9
    sizes = set()
    for row, ids, token, logprob in zip(logits, kept, whole.token_ids, whole.logprobs, strict=True):
        order = row.argsort(descending=True)[:6]
        before = row[order].softmax(-1).cumsum(-1) - row[order].softmax(-1)
        expected = order[before < 0.7]
        assert sorted(ids[ids >= 0].tolist()) == sorted(expected.tolist())
        at = expected.tolist().index(int(token))
        assert row[expected].log_softmax(-1)[at].item() == pytest.approx(float(logprob), abs=1e-4)
        sizes.add(len(expected))
    assert len(sizes) > 1, "the number of ids differs between tokens"
    assert of_greedy.token_data["kept_ids"][:, 0].tolist() == of_greedy.token_ids.tolist()
    assert (of_greedy.token_data["kept_ids"][:, 1:] == -1).all()
    assert of_plain.token_data == {}


async def test_more_kept_ids_than_declared_fail_their_request_alone(make_generator, ask):
    generator = make_generator()
    wide = ask("wide", PROMPT, temperature=1.0, top_k=9, max_kept_ids=4)
    other = ask("other", PROMPT, temperature=1.0, top_k=3, max_kept_ids=4)
    failed, found = await asyncio.gather(*start(generator, wide, other), return_exceptions=True)
    assert isinstance(failed, BackendError)
    assert "'wide' failed: token 0 was sampled from more than max_kept_ids=4 ids" in str(failed)
    assert len(found.token_ids) == 12
