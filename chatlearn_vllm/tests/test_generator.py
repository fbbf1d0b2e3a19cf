"""The adapter's own part, with a host that stands for an engine: bad answers, silence, death."""

from __future__ import annotations

import asyncio
import math

import pytest

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ConfigError, HostedCallError
from chatlearn_core.protocols.lifecycle import ModelSource, RoleContext
from chatlearn_core.types import VersionSpan
from chatlearn_vllm.generator import VLLMGenerator
from chatlearn_vllm.options import VLLMGeneratorOptions

FACTS = {
    "max_model_len": 64,
    "vocab_size": 300,
    "dtype": "float32",
    "num_workers": 1,
    "takes_adapters": False,
    "offload_problem": None,
}


class ScriptedHost:
    """Records what it is asked for, and says what a test lets it say."""

    shares_memory = True
    lost = None

    def __init__(self):
        self.submitted = []
        self.calls = []
        self.fail_on = None
        self.on_event = None

    def start(self, arguments, *, log_level, num_threads):
        return FACTS

    def listen(self, on_event):
        self.on_event = on_event

    def submit(self, requests):
        self.submitted.append([request["key"] for request in requests])

    def drop(self, keys):
        self.calls.append(("drop", list(keys)))

    async def call(self, method, *arguments):
        self.calls.append((method, *arguments))
        await asyncio.sleep(0)
        if method == self.fail_on:
            raise HostedCallError(f"{method} failed: the engine said no")

    def call_blocking(self, method, *arguments, timeout_s):
        self.calls.append((method, *arguments))
        if method == self.fail_on:
            raise HostedCallError(f"{method} failed: the engine said no")

    def close(self):
        self.calls.append(("close",))


@pytest.fixture
def stand(model_dir, monkeypatch):
    """(generator, host)"""
    host = ScriptedHost()
    monkeypatch.setattr(VLLMGenerator, "_make_host", lambda self: host)
    path = str(model_dir())
    generator = VLLMGenerator(VLLMGeneratorOptions(), RoleContext("generator", ModelSource(path, path)))
    generator.setup()
    return generator, host


async def begin(generator, *requests):
    """Tasks of requests that have reached the host."""
    tasks = [asyncio.ensure_future(generator.generate(request)) for request in requests]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_requests_of_one_turn_reach_the_engine_together_in_their_order(stand, make_request):
    generator, host = stand
    tasks = await begin(generator, *(make_request([1], str(n)) for n in range(3)))
    assert host.submitted == [[0, 1, 2]]
    tasks += await begin(generator, make_request([1], "later"))
    assert host.submitted == [[0, 1, 2], [3]]
    generator.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_completion_holds_what_each_version_sampled(stand, make_request):
    generator, host = stand
    [task] = await begin(generator, make_request([1, 2], "r", max_tokens=3))
    host.on_event(("tokens", 0, [(0, [7], [-0.5], None, 0, None)]))
    host.on_event(("tokens", 4, [(0, [8], [-1.5], None, None, None)]))
    host.on_event(("tokens", 4, [(0, [9], [-2.5], "length", None, None)]))
    completion = await task
    assert completion.token_ids.tolist() == [7, 8, 9]
    assert completion.logprobs.tolist() == [-0.5, -1.5, -2.5]
    assert completion.version_spans == (VersionSpan(0, 1, 0), VersionSpan(1, 3, 4))


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (([7], [math.nan], "length"), "the logprob of token 0 is nan"),
        (([7, 8, 9], [-1.0, -math.inf, -1.0], "length"), "the logprob of token 1 is -inf"),
        (([7], [-1.0], "length"), "reason 'length' after 1 of 3 tokens"),
        (([7, 8, 9], [-1.0], "length"), "returned 3 tokens and 1 logprobs"),
        (([7, 8, 9], [], "length"), "returned 3 tokens and 0 logprobs"),
        (([], [], "stop"), "reason 'stop' without a token"),
        (([7], [-1.0], "error"), "ended it with 'error'"),
    ],
    ids=["nan", "infinite", "too few tokens", "too few logprobs", "no logprobs", "nothing", "error"],
)
async def test_an_invalid_answer_fails_only_its_request(stand, make_request, report, problem):
    generator, host = stand
    bad, good = await begin(
        generator, make_request([1], "the-bad-one", max_tokens=3), make_request([1], "good", max_tokens=1)
    )
    token_ids, logprobs, reason = report
    host.on_event(("tokens", 0, [(0, token_ids, logprobs, reason, 0, None), (1, [5], [-1.0], "length", 0, None)]))
    with pytest.raises(BackendError, match=rf"request 'the-bad-one' failed: .*{problem}"):
        await bad
    assert (await good).token_ids.tolist() == [5]
    assert generator.state == "serving"


async def test_an_engine_that_never_answers_times_out_and_the_request_is_dropped(stand, make_request):
    generator, host = stand
    with pytest.raises(BackendTimeoutError, match=r"request 'silent' \(1 prompt tokens.*within 0\.02 s"):
        await generator.generate(make_request([1], "silent", timeout_s=0.02))
    assert ("drop", [0]) in host.calls
    assert generator.state == "serving"


async def test_a_caller_that_goes_away_drops_its_request(stand, make_request):
    generator, host = stand
    [task] = await begin(generator, make_request([1], "gone"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ("drop", [0]) in host.calls
    host.on_event(("tokens", 0, [(0, [7], [-1.0], None, 0, None)]))  # it was on its way already


async def test_a_refused_request_is_named(stand, make_request):
    generator, host = stand
    [task] = await begin(generator, make_request([1], "odd"))
    host.on_event(("refused", 0, "top_k must be at least -1"))
    with pytest.raises(BackendError, match="refused request 'odd': top_k must be at least -1"):
        await task


async def test_a_dead_engine_fails_all_requests_and_accepts_no_more(stand, make_request):
    generator, host = stand
    tasks = await begin(generator, make_request([1], "a"), make_request([1], "b"))
    host.on_event(("dead", "RuntimeError: out of memory", None))
    for task, name in zip(tasks, "ab", strict=True):
        with pytest.raises(
            BackendError, match=f"request '{name}' failed: the engine died: RuntimeError: out of memory"
        ):
            await task
    assert generator.state == "dead"
    assert "out of memory" in generator.health()
    with pytest.raises(BackendError, match="cannot take request 'late'; restart it"):
        await generator.generate(make_request([1], "late"))


async def test_tokens_that_cannot_be_decoded_fail_their_request(stand, make_request, monkeypatch):
    generator, host = stand
    [task] = await begin(generator, make_request([1], "odd", max_tokens=1))

    def refuse(*_, **__):
        raise OverflowError("no such token")

    monkeypatch.setattr(generator._tokenizer, "batch_decode", refuse)
    host.on_event(("tokens", 0, [(0, [7], [-1.0], "length", None, None)]))
    with pytest.raises(BackendError, match=r"request 'odd' cannot be decoded: OverflowError: no such token"):
        await task


async def test_an_engine_that_does_not_run_a_command_in_time_is_dead(stand, monkeypatch):
    generator, host = stand

    async def hang(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr("chatlearn_vllm.generator._CALL_TIMEOUT_S", 0.01)
    monkeypatch.setattr(host, "call", hang)
    with pytest.raises(BackendTimeoutError, match=r"did not run 'pause' within 0\.01 s; restart it"):
        await generator.pause()
    assert generator.state == "dead"


async def test_an_engine_that_cannot_release_memory_says_why(model_dir, monkeypatch):
    host = ScriptedHost()
    host.start = lambda *_, **__: FACTS | {"offload_problem": "engine.enable_sleep_mode is false; remove it"}
    monkeypatch.setattr(VLLMGenerator, "_make_host", lambda self: host)
    path = str(model_dir())
    generator = VLLMGenerator(VLLMGeneratorOptions(), RoleContext("generator", ModelSource(path, path)))
    generator.setup()
    with pytest.raises(BackendError, match=r"cannot be offloaded: engine\.enable_sleep_mode is false; remove it; or"):
        generator.offload({"kv_cache"})
    assert generator.state == "serving"


@pytest.mark.parametrize("method", ["sleep", "wake"])
async def test_an_engine_that_fails_to_move_its_memory_is_dead(stand, method):
    generator, host = stand
    host.fail_on = method
    await generator.pause()
    if method == "wake":
        generator.offload({"weights"})
    move = generator.offload if method == "sleep" else generator.onload
    with pytest.raises(BackendError, match=f"{method} failed"):
        move({"weights"})
    assert generator.state == "dead"


async def test_parts_sleep_and_wake_in_the_order_that_was_asked(stand, make_request):
    generator, host = stand
    await generator.pause()
    host.calls.clear()
    generator.offload({"kv_cache"})
    generator.offload({"weights"})
    generator.onload({"weights"})
    with pytest.raises(BackendError, match="'kv_cache' offloaded; onload it"):
        await generator.resume()
    generator.onload({"kv_cache"})
    generator.offload({"optimizer"})
    assert host.calls == [
        ("sleep", 0),
        ("sleep", 1),
        ("wake", ["weights"]),
        ("wake", ["kv_cache"]),
    ]
    await generator.resume()


async def test_generation_is_refused_while_weights_are_dropped(model_dir, monkeypatch, make_request):
    host = ScriptedHost()
    monkeypatch.setattr(VLLMGenerator, "_make_host", lambda self: host)
    path = str(model_dir())
    context = RoleContext("generator", ModelSource(path, path))
    generator = VLLMGenerator(VLLMGeneratorOptions(sleep_level=2), context)
    generator.setup()
    await generator.pause()
    generator.offload({"weights"})
    generator.onload({"weights"})
    assert ("sleep", 2) in host.calls
    with pytest.raises(BackendError, match=r"dropped its weights.*sync weights before generating"):
        await generator.resume()
    await generator.stop_serving()
    await generator.serve(1)
    await generator.resume()


def test_another_gpu_than_the_first_needs_a_child():
    context = RoleContext("actor", ModelSource("m", "m"), device="cuda:1")
    with pytest.raises(ConfigError, match=r"roles\.actor\.options\.host to child"):
        VLLMGenerator(VLLMGeneratorOptions(), context)._make_host()
