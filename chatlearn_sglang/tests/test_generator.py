"""The adapter in front of an engine that answers as a test says."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

from chatlearn_core.exceptions import (
    BackendError,
    ConfigError,
    HostedCallError,
    HostedProcessLostError,
    WeightSyncError,
)
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.types import WeightManifest
from chatlearn_sglang.generator import SGLangGenerator
from chatlearn_sglang.options import SGLangGeneratorOptions
from chatlearn_testing.suites.generator_fixtures import ask

FACTS = {"version": "0.5.23", "tp_size": 1, "pp_size": 1, "keeps_memory": False}


class FakeProcess:
    """Stands in for ``HostedProcess``: notes what is called and answers by ``reply``."""

    def __init__(self, name: str, **launch: Any) -> None:
        self.launch = launch
        self.lost: str | None = None
        self.called: list[str] = []
        self.release = asyncio.Event()
        self.release.set()
        self.start_error: Exception | None = None

    def start(self, timeout_s: float) -> None:
        if self.start_error is not None:
            raise self.start_error

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self.called.append(method)
        return FACTS if method == "facts" else None

    async def acall(self, method: str, *args: Any, on_event: Callable[[Any], None] | None = None) -> Any:
        self.called.append(method)
        if self.lost:
            raise HostedProcessLostError(f"{method} failed: {self.lost}")
        if method != "generate":
            return None
        await self.release.wait()
        count = args[2]["max_tokens"]
        if on_event is not None:
            on_event([9] * count)
        return self.reply(count)

    @staticmethod
    def reply(count: int, **fields: Any) -> dict[str, Any]:
        return {
            "token_ids": [9] * count,
            "logprobs": [-1.0] * count,
            "finish": {"type": "length"},
            "text": "x" * count,
            "spans": [(0, count, 0)],
            "num_cached_tokens": 0,
            "kept": [],
        } | fields

    def close(self, grace_s: float = 10.0) -> None:
        self.lost = self.lost or "it was closed"


@pytest.fixture
def make(model_dir, monkeypatch) -> Callable[..., tuple[SGLangGenerator, FakeProcess]]:
    """``make(start_error=None, **options)``: a generator and its process, set up."""

    def build(start_error: Exception | None = None, **context: Any) -> tuple[SGLangGenerator, FakeProcess]:
        made: list[FakeProcess] = []

        def start(*args: Any, **launch: Any) -> FakeProcess:
            made.append(FakeProcess(*args, **launch))
            made[0].start_error = start_error
            return made[0]

        monkeypatch.setattr("chatlearn_sglang.generator.HostedProcess", start)
        source = ModelSource(str(model_dir()), str(model_dir()), max_length=64)
        options = SGLangGeneratorOptions(python=sys.executable)
        generator = SGLangGenerator(options, RoleContext("actor", source, **context))
        generator.setup()
        return generator, made[0]

    return build


def test_the_engine_is_launched_with_what_the_role_says(make) -> None:
    _, process = make(world_size=2, engine_arguments={"max_running_requests": 4})
    assert process.launch["python"] == sys.executable
    launch = process.launch["arguments"]
    assert launch["cpu"] is True
    assert launch["arguments"] == {"max_running_requests": 4, "tp_size": 2}
    assert launch["owned"]["dtype"] == "float32"


def test_an_unknown_engine_argument_is_an_error_of_the_configuration(make) -> None:
    error = HostedCallError("start failed")
    error.type_name, error.text = "UnknownArgumentsError", "tp_sise: unknown; did you mean 'tp_size'?"
    with pytest.raises(ConfigError, match=r"roles\.actor\.engine holds arguments(.|\n)*tp_sise: unknown; did you mean"):
        make(error)


async def test_a_faulty_answer_fails_its_request_by_name_and_no_other(make, monkeypatch) -> None:
    generator, process = make()
    good = process.reply
    monkeypatch.setattr(process, "reply", lambda count: good(count, logprobs=[None] * count))
    with pytest.raises(BackendError, match=r"\(sglang\): request 'bad' failed: the logprob of token 0 is nan"):
        await generator.generate(ask("bad"))
    monkeypatch.setattr(process, "reply", good)
    assert (await generator.generate(ask("good"))).request_id == "good"
    assert generator.state == "serving"


async def test_a_callback_that_raises_fails_its_request_by_name(make) -> None:
    generator, _ = make()

    def on_tokens(start: int, token_ids: list[int]) -> None:
        raise ZeroDivisionError("of the caller")

    with pytest.raises(BackendError, match="request 'told': on_tokens raised ZeroDivisionError: of the caller"):
        await generator.generate(ask("told"), on_tokens)


async def test_requests_submitted_while_paused_enter_in_order_or_return_partial_completions(make) -> None:
    generator, process = make()
    await generator.pause()
    waiting = [asyncio.ensure_future(generator.generate(ask(name))) for name in ("a", "b", "c")]
    await asyncio.sleep(0)
    assert process.called.count("generate") == 0
    await generator.abort({"b", "nobody"})
    assert (await waiting[1]).finish_reason == "abort"
    await generator.resume()
    assert [(await task).finish_reason for task in waiting] == ["length", "abort", "length"]
    assert process.called.count("generate") == 2


async def test_tokens_that_arrive_while_paused_are_reported_afterwards(make) -> None:
    generator, process = make()
    process.release.clear()
    told: list[int] = []
    task = asyncio.ensure_future(generator.generate(ask("slow"), lambda start, tokens: told.extend(tokens)))
    await asyncio.sleep(0)
    await generator.pause()
    pending_request = next(iter(generator._pending.values()))
    generator._on_event(pending_request, [4])  # sampled before, passed on late
    assert told == []
    await generator.resume()
    assert told == [4]
    process.release.set()
    await task


async def test_the_replica_is_dead_when_its_process_is_gone(make) -> None:
    generator, process = make()
    process.lost = "its process 7 was killed by signal 9 (SIGKILL)"
    assert generator.state == "dead"
    assert "signal 9" in str(generator.health())
    with pytest.raises(
        BackendError, match="is dead and cannot take request 'late'; restart it: its process 7 was killed"
    ):
        await generator.generate(ask("late"))
    with pytest.raises(WeightSyncError, match="is dead; restart it"):
        await generator.loader.begin(1, generator.loader.expected_manifest())


async def test_generation_is_refused_while_parts_are_offloaded(make) -> None:
    generator, process = make()
    generator.offload({"kv_cache", "optimizer"})
    generator.offload({"kv_cache", "weights"})
    with pytest.raises(BackendError, match="has 'weights' offloaded; onload it before generating"):
        await generator.generate(ask("early"))
    with pytest.raises(WeightSyncError, match="has its weights offloaded"):
        await generator.loader.begin(1, generator.loader.expected_manifest())
    generator.onload({"weights", "kv_cache"})
    generator.onload({"weights"})
    assert (await generator.generate(ask("now"))).finish_reason == "length"
    assert [name for name in process.called if name in ("release", "reclaim")] == ["release", "release", "reclaim"]


async def test_offloading_is_refused_while_requests_run(make) -> None:
    generator, process = make()
    process.release.clear()
    task = asyncio.ensure_future(generator.generate(ask("running")))
    await asyncio.sleep(0)
    with pytest.raises(BackendError, match="is generating; pause it before it is offloaded"):
        generator.offload({"weights"})
    process.release.set()
    await task


async def test_adapters_and_boxes_are_refused_by_name(make) -> None:
    loader = make()[0].loader
    expected = loader.expected_manifest()
    with pytest.raises(
        WeightSyncError, match=r"offers a LoRA adapter; set options\.lora, or weight_sync\.payload to full"
    ):
        await loader.begin(1, WeightManifest(expected.tensors, expected.aliases, adapter={"r": 4}))
    with pytest.raises(WeightSyncError, match="takes whole tensors, not boxes; choose a transport with channel"):
        await loader.load_boxes([])
