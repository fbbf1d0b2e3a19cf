"""The engine outside the adapter's process: under an interpreter that has nothing of ours, and in parallel workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_testing.listeners import family, listeners, reached_from_outside
from chatlearn_testing.model_directory import copy_with_weights, manifest_of, perturbed, read_checkpoint
from chatlearn_vllm.conformance import ENGINE_ARGUMENTS

pytestmark = pytest.mark.engine

PROMPT = [5, 9, 3]


@pytest.fixture(scope="session")
def other_python(tmp_path_factory):
    """An interpreter that has vLLM and torch, and no distribution of this repository: those are found by ``.pth`` files
    of this environment, which another one does not read.
    """
    home = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    site = next((home / "lib").glob("python*")) / "site-packages"
    (site / "engine.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = home / "bin" / "python"
    absent = subprocess.run([python, "-c", "import torch, chatlearn_hf"], capture_output=True, text=True, check=False)
    assert "No module named 'chatlearn_hf'" in absent.stderr
    return str(python)


@pytest.fixture(scope="module")
def new_model(model_dir, tmp_path_factory):
    """The same model with other weights."""
    weights = perturbed(read_checkpoint(model_dir()), seed=1)
    return copy_with_weights(model_dir(), weights, tmp_path_factory.mktemp("new") / "m")


@pytest.fixture
def greedy(load_model):
    def generate(directory):
        out = load_model(directory).generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12, pad_token_id=0, eos_token_id=None
        )
        return out[0, len(PROMPT) :].tolist()

    return generate


def follows_two_syncs(replica, old, new, greedy):
    assert replica.generate(PROMPT).token_ids.tolist() == greedy(old)
    replica.sync(read_checkpoint(new))
    assert replica.generate(PROMPT).token_ids.tolist() == greedy(new)

    async def from_checkpoint():
        loader = replica.loader
        await loader.begin(7, manifest_of(read_checkpoint(old), loader.expected_manifest().aliases))
        await loader.load_checkpoint(old)
        return await loader.finish()

    assert replica.run(from_checkpoint()) == 7
    answer = replica.generate(PROMPT)
    assert answer.token_ids.tolist() == greedy(old)
    assert [span.version for span in answer.version_spans] == [7]


class TestOtherInterpreter:
    @pytest.fixture(scope="class")
    @classmethod
    def replica(cls, model_dir, make_replica, other_python):
        replica = make_replica(model_dir(), python=other_python, bucket_mb=1)
        yield replica
        replica.close()

    def test_it_follows_syncs(self, replica, model_dir, new_model, greedy):
        follows_two_syncs(replica, model_dir(), new_model, greedy)

    def test_tokens_stream_and_abort_keeps_them(self, replica, make_request):
        async def interrupted():
            begun, told = asyncio.Event(), []

            def on_tokens(start, token_ids):
                assert start == len(told)
                told.extend(token_ids)
                if len(told) >= 3:
                    begun.set()

            generator = replica.generator
            task = asyncio.ensure_future(generator.generate(make_request(PROMPT, "long", max_tokens=100), on_tokens))
            await begun.wait()
            await generator.pause()
            await generator.abort({"long"})
            await generator.resume()
            return await task, told

        for _ in range(5):  # on a busy machine the engine may be done before it is paused
            partial, told = replica.run(interrupted())
            if partial.finish_reason == "abort":
                break
        assert partial.finish_reason == "abort"
        assert partial.token_ids.tolist() == told[: len(partial.token_ids)]
        assert 3 <= len(partial.token_ids) < 100

    def test_a_killed_engine_fails_pending_requests_and_is_named(self, replica, make_request):
        """Last in the class: it ends the engine."""

        async def killed():
            begun = asyncio.Event()
            task = asyncio.ensure_future(
                replica.generator.generate(make_request(PROMPT, "cut", max_tokens=100), lambda *_: begun.set())
            )
            await begun.wait()
            await replica.generator.pause()  # or it might end before the kill
            os.kill(replica.generator._host.process.pid, signal.SIGKILL)
            await task

        with pytest.raises(BackendError, match=r"request 'cut' failed: .*SIGKILL"):
            replica.run(killed())
        assert replica.generator.state == "dead"
        with pytest.raises(BackendError, match=r"is dead and cannot take request 'late'; restart it"):
            replica.run(replica.generator.generate(make_request(PROMPT, "late")))


@pytest.mark.parametrize(
    ("phase", "by"),
    [
        ("sync", "SIGKILL"),
        pytest.param("wake", "SIGKILL", marks=pytest.mark.grid),
        pytest.param("sync", "SIGSTOP", marks=pytest.mark.grid),
    ],
)
@pytest.mark.slow
def test_an_engine_killed_or_stopped_during(phase, by, model_dir, make_replica, monkeypatch):
    monkeypatch.setattr("chatlearn_hosting.process.SILENCE_S", 3.0)
    replica = make_replica(model_dir(), host="child")
    generator, tensors = replica.generator, read_checkpoint(model_dir())

    def kill():
        os.kill(generator._host.process.pid, getattr(signal, by))

    async def sync():
        await generator.loader.begin(1, manifest_of(tensors, generator.loader.expected_manifest().aliases))
        await generator.loader.load_tensors(list(tensors.items())[:3])
        kill()
        await generator.loader.load_tensors(list(tensors.items())[3:])

    async def wake():
        await generator.pause()
        generator.offload({"weights", "kv_cache"})
        kill()
        generator.onload({"weights", "kv_cache"})

    try:
        with pytest.raises(BackendError, match=by):
            replica.run(sync() if phase == "sync" else wake())
        assert generator.state == "dead"
        assert by in generator.health()
    finally:
        replica.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "argument", [pytest.param("tensor_parallel_size", marks=pytest.mark.matrix), "pipeline_parallel_size"]
)
def test_two_parallel_workers_follow_syncs_and_give_memory_back(argument, model_dir, new_model, make_replica, greedy):
    replica = make_replica(model_dir(), engine={argument: 2})
    try:
        assert replica.loader.num_group_ranks == 2
        follows_two_syncs(replica, model_dir(), new_model, greedy)
        assert not reached_from_outside(listeners(family()))
        generator, before = replica.generator, replica.generate(PROMPT)
        weights = generator.live_bytes("weights")
        assert generator.live_bytes("kv_cache") == 2 * ENGINE_ARGUMENTS["kv_cache_memory_bytes"]
        generator.offload({"weights", "kv_cache"})
        assert [generator.live_bytes(part) for part in ("weights", "kv_cache")] == [0, 0]
        generator.onload({"weights", "kv_cache"})
        assert generator.live_bytes("weights") == weights
        assert replica.generate(PROMPT).logprobs.tolist() == before.logprobs.tolist()
    finally:
        replica.close()


def test_an_unknown_engine_argument_is_an_error_with_the_nearest_name(model_dir, make_replica):
    with pytest.raises(
        ConfigError, match=r"roles\.generator\.engine.*\n  max_num_seq: unknown; did you mean"
    ) as caught:
        make_replica(model_dir(), engine={"max_num_seq": 4})
    assert "'max_num_seqs'" in str(caught.value)


def test_an_engine_that_does_not_start_says_why(model_dir, make_replica):
    with pytest.raises(BackendError, match=r"the engine does not start: .*head_dim"):
        make_replica(model_dir(hidden=64), engine={})


def test_a_missing_interpreter_is_named(tmp_path, model_dir, make_replica):
    with pytest.raises(BackendError, match="no-python' cannot be run"):
        make_replica(model_dir(), python=str(Path(tmp_path) / "no-python"))
