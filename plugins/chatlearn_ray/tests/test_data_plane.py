"""Tokens go from worker to worker by reference: what passes through the driver does not grow with them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import TrainerLostError, UnfetchedError
from chatlearn_core.types import (
    ArrayRef,
    Completion,
    Derived,
    GenerateRequest,
    Metric,
    OutputRequest,
    Prompt,
    Sample,
    SamplingParams,
    TensorRef,
    TrainBatch,
    pack_samples,
    per_sequence,
    sample_from_completion,
)
from chatlearn_workers.rpc import StoredValueLostError

from .test_runtime import loss, running

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("ray_session")]
NUM_SAMPLES = 6
PROMPT_TOKENS = 10


def check_sums(batch: TrainBatch) -> Derived:
    """What a worker finds in its slice: it runs there, so it sees ordinary tensors."""
    stored = any(isinstance(tensor, TensorRef) for tensor in (batch.token_ids, *batch.token_data.values()))
    firsts = batch.token_ids[batch.cu_seqlens[:-1].long()].double()
    metrics = {
        "tokens": Metric(float(batch.token_ids.sum()), reducer="sum"),
        "twice": Metric(float((batch.token_data["trainer_logprobs"] + 2 * batch.token_ids).abs().sum()), reducer="sum"),
        "stored": Metric(float(stored), reducer="max"),
    }
    return Derived({"doubled": 2 * batch.token_ids}, {"first": firsts}, metrics=metrics)


def count_tokens(batch: TrainBatch) -> Derived:
    """Metrics and no data."""
    return Derived(metrics={"tokens": Metric(batch.num_tokens, reducer="sum")})


async def one_step(runtime: Any, generator: str, completion_tokens: int) -> dict[str, float]:
    """Generate, score, compute, measure, update; the metrics of the update."""
    samples = await generated(runtime, generator)
    total = sum(range(PROMPT_TOKENS)) * NUM_SAMPLES * (1 + completion_tokens // PROMPT_TOKENS)
    assert all(isinstance(sample.token_ids, ArrayRef) for sample in samples)

    results = await runtime.reward("reward").score(samples)
    length = float(PROMPT_TOKENS + completion_tokens)
    assert [result.components["tokens"] for result in results] == [length] * NUM_SAMPLES

    trainer = runtime.trainer("trainer")
    batch = pack_samples(samples)
    outputs = await trainer.compute(batch, OutputRequest(frozenset({"logprobs"})))
    assert isinstance(outputs["logprobs"], TensorRef)
    rows = per_sequence(outputs["logprobs"], batch.lengths, batch.sample_ids, "trainer_logprobs")
    for sample, logprobs in zip(samples, rows, strict=True):
        sample.token_data["trainer_logprobs"] = logprobs
        sample.token_data["advantages"] = np.where(sample.loss_mask, 0.5, 0.0).astype(np.float32)

    derived = await trainer.derive(pack_samples(samples), check_sums)
    assert isinstance(derived.token_data["doubled"], TensorRef)
    assert derived.sequence_data["first"].tolist() == [0.0] * NUM_SAMPLES
    assert {name: metric.value for name, metric in derived.metrics.items()} == {
        "tokens": total,
        "twice": 0.0,
        "stored": 0.0,
    }

    alone = await trainer.derive(pack_samples(samples), count_tokens, "batch")
    assert alone.metrics["tokens"].value == total / sum(range(PROMPT_TOKENS)) * PROMPT_TOKENS
    assert not alone.token_data

    metrics = await trainer.update(pack_samples(samples), loss(1.0))
    assert metrics["token_ids"].value == total
    traffic = {name: metrics[name].value for name in ("perf/driver_bytes", "perf/object_store_bytes")}

    with pytest.raises(UnfetchedError, match="'token_ids' of 's0'"):
        samples[0].token_ids.tolist()
    [first] = runtime.data.get(samples[:1], {"token_ids", "text"})
    assert first.token_ids.tolist() == list(range(PROMPT_TOKENS)) * (1 + completion_tokens // PROMPT_TOKENS)
    assert first.text.startswith("s")
    assert isinstance(first.token_data["trainer_logprobs"], ArrayRef), "it was not asked for"
    looked_at = (await trainer.update(pack_samples(samples), loss(1.0)))["perf/driver_bytes"].value
    assert looked_at >= completion_tokens * 8, "what a store brings into the driver is counted"
    both = runtime.data.get_tensors({**derived.token_data, "token_ids": pack_samples(samples).token_ids})
    assert both["doubled"].equal(2 * both["token_ids"])
    await trainer.update(pack_samples(samples), loss(1.0))  # what was counted since is not the next step's
    return traffic


PROMPT = Prompt("p", np.arange(PROMPT_TOKENS), "?")


async def completed(runtime: Any, generator: str = "generator") -> list[Completion]:
    requests = [
        GenerateRequest(f"s{i}", PROMPT.token_ids, SamplingParams(max_tokens=10**6), f"g{i // 2}")
        for i in range(NUM_SAMPLES)
    ]
    completions = await asyncio.gather(*(runtime.generator(generator).generate(request) for request in requests))
    assert all(isinstance(completion.token_ids, ArrayRef) for completion in completions)
    return list(completions)


async def generated(runtime: Any, generator: str = "generator") -> list[Sample]:
    completions = await completed(runtime, generator)
    return [sample_from_completion(c.request_id, f"g{i // 2}", PROMPT, c) for i, c in enumerate(completions)]


async def test_bytes_through_the_driver_do_not_grow_with_the_completions(roles: Any) -> None:
    sizes = {"short": 1_000, "long": 50_000}
    plan = roles.plan(
        *(roles.role(name, "generator", "echo", repeat=size // PROMPT_TOKENS) for name, size in sizes.items()),
        roles.role("reward", "reward", "where"),
        roles.role("trainer", "trainer", "counting", ranks=2),
    )
    async with running(plan) as runtime:
        short, long = [await one_step(runtime, name, size) for name, size in sizes.items()]
    assert long["perf/object_store_bytes"] > 40 * short["perf/object_store_bytes"], "the completions did grow"
    # Token ids and logprobs of one completion alone are 600 kB.
    assert long["perf/driver_bytes"] == short["perf/driver_bytes"] < 20_000


async def test_a_completion_outlives_the_replica_that_made_it(roles: Any) -> None:
    plan = roles.plan(
        roles.role("generator", "generator", "echo", repeat=20_000), roles.role("trainer", "trainer", "counting")
    )
    async with running(plan) as runtime:
        samples = await generated(runtime)
        runtime.generator("generator").replicas[0].worker.kill()
        metrics = await runtime.trainer("trainer").update(pack_samples(samples), loss(1.0))
        assert metrics["token_ids"].value == sum(range(PROMPT_TOKENS)) * NUM_SAMPLES * 20_001


async def test_a_resumed_request_reaches_the_engine_with_ordinary_arrays(roles: Any) -> None:
    async with running(roles.plan(roles.role("generator", "generator", "echo"))) as runtime:
        [prior, *_] = await completed(runtime)
        again = GenerateRequest("again", np.arange(3), SamplingParams(max_tokens=10**6), resume_from=prior)
        completion = await runtime.generator("generator").generate(again)
        [plain] = runtime.data.get_completions([completion], {"token_ids"})
        assert plain.token_ids.tolist() == [*range(PROMPT_TOKENS), 0, 1, 2]


async def test_a_lost_block_is_told_as_lost_tokens(roles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(roles.plan(roles.role("generator", "generator", "echo"))) as runtime:
        samples = await generated(runtime)

        def lost(store: Any, references: Any, timeout_s: float) -> Any:
            raise StoredValueLostError("its node left")

        monkeypatch.setattr(type(runtime.store), "get", lost)
        with pytest.raises(TrainerLostError, match="the step has to be made again: its node left"):
            await runtime.data.aget(samples, {"token_ids"})
