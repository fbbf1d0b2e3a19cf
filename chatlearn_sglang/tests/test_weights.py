"""New weights by every channel, and what happens when they cannot be taken; untied embeddings, one rank."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, HostedCallError, WeightSyncError
from chatlearn_core.types import GroupRendezvous
from chatlearn_hosting import SharedBlock, handle_content
from chatlearn_testing.model_directory import copy_with_weights, manifest_of, perturbed, read_checkpoint
from chatlearn_testing.suites.generator_fixtures import PROMPTS, ask

pytestmark = pytest.mark.engine

CHANNELS = ["tensors", "checkpoint", "memory_handles", "process_group"]


@pytest.fixture(scope="module")
def directory(model_dir) -> Path:
    return model_dir("llama", tie=False)


@pytest.fixture(scope="module")
def other(directory, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("other") / "model"
    return copy_with_weights(directory, perturbed(read_checkpoint(directory), seed=1), target)


@pytest.fixture(scope="module")
def engine(start_engine, directory):
    return start_engine(directory)


def seeded(engine) -> tuple[list[list[int]], np.ndarray]:
    """Sampled tokens and their logprobs."""
    requests = [ask(f"seeded-{i}", prompt, temperature=1.0, seed=i) for i, prompt in enumerate(PROMPTS)]
    completions = engine.ask(*requests)
    return [c.token_ids.tolist() for c in completions], np.concatenate([c.logprobs for c in completions])


@pytest.mark.parametrize("channel", CHANNELS)
def test_synced_weights_are_used_and_reloading_the_old_ones_changes_nothing(
    engine, directory, other, channel, assert_serves
) -> None:
    (tokens, logprobs), version = seeded(engine), engine.generator.policy_version
    assert engine.sync(channel, other) == version + 1
    assert_serves(engine, other)
    assert engine.sync(channel, directory) == version + 2
    assert_serves(engine, directory)
    tokens_after, logprobs_after = seeded(engine)
    assert tokens_after == tokens
    np.testing.assert_allclose(logprobs_after, logprobs, atol=1e-5)  # what is computed together depends on timing


def test_a_failed_rank_reports_why_and_keeps_running(engine, directory, assert_serves) -> None:
    process, of_sync = engine.generator._process, {"sync": 98, "adapter": False, "copies": {}}
    with SharedBlock(1 << 16) as block:
        block.add("model.norm.weight", torch.zeros(3))
        with pytest.raises(HostedCallError, match=r"rank 0: (Assertion|Runtime|Value)Error"):
            process.call("load", "block", handle_content(block.handle()) | of_sync, timeout_s=60)
    content = {"group": "nowhere", "backend": "gloo", "tensors": []} | of_sync
    with pytest.raises(HostedCallError, match="not joined the group 'nowhere'"):
        process.call("load", "broadcast", content, timeout_s=60)
    assert_serves(engine, directory)


def test_a_missing_sender_is_named(engine) -> None:
    with pytest.raises(BackendTimeoutError, match=r"its 1 ranks could not join the sender .*'nobody' at 127.0.0.1:9"):
        engine.run(engine.generator.loader.join_group(GroupRendezvous("nobody", "127.0.0.1:9", "gloo", 2, 1, 1.0)))
    assert engine.generator.state == "serving"


def test_a_sequence_of_the_models_whole_length_is_sampled(engine) -> None:
    [completion] = engine.ask(ask("long", (5,) * 28, max_tokens=100))
    assert (len(completion.token_ids), completion.finish_reason) == (100, "length")


def test_damaged_weights_fail_the_request_by_name(engine, directory, tmp_path, assert_serves) -> None:
    tensors = read_checkpoint(directory)
    broken = dict(tensors) | {"model.norm.weight": torch.full_like(tensors["model.norm.weight"], torch.nan)}
    engine.sync("tensors", copy_with_weights(directory, broken, tmp_path / "broken"))
    with pytest.raises(BackendError, match="request 'damaged' failed: the logprob of token 0 is"):
        engine.ask(ask("damaged"))
    engine.sync("tensors", directory)
    assert_serves(engine, directory)


def test_an_engine_that_is_killed_during_a_sync_is_dead_and_says_how(engine, directory) -> None:
    """The last test of this engine."""
    generator, tensors = engine.generator, read_checkpoint(directory)
    pid = generator._process.pid

    async def interrupted() -> None:
        loader = generator.loader
        kept = asyncio.ensure_future(generator.generate(ask("kept", max_tokens=100)))
        await asyncio.sleep(0)
        await loader.begin(99, manifest_of(tensors))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WeightSyncError, match=r"killed by signal 9 \(SIGKILL\)"):
            await loader.load_tensors(tensors.items())
        with pytest.raises(BackendError, match=r"request 'kept' failed: .*SIGKILL"):
            await kept

    engine.run(interrupted())
    assert generator.state == "dead"
    assert "SIGKILL" in str(generator.health())
    with pytest.raises(BackendError, match="is dead and cannot take request 'late'"):
        engine.ask(ask("late"))
