"""Rollouts that last longer than a step, on the real generator: exact under changing weights, and through a kill."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from chatlearn_core.config.models import RolloutConfig, RunConfig
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.rollouts.partial import PartialRollouts, partial_rollouts
from chatlearn_core.executor.rollouts.pending import Group
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.protocols import ModelSource, PlainData, RoleContext
from chatlearn_core.runtime.serial_executor import SerialExecutor
from chatlearn_core.types import Completion, ExampleDraw, GenerateRequest, Prompt, SamplingParams
from chatlearn_hf.checkpoint_names import checkpoint_tensors
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_local.fleet import LocalFleet
from chatlearn_transformers.generator import TransformersGenerator
from chatlearn_transformers.options import TransformersGeneratorOptions

pytestmark = pytest.mark.engine

LONG = 100
"""Tokens of the completion that lasts over two syncs, even if the event loop gets its turns late."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models of one shape: weights of versions 0, 1 and 2."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    return [build_tiny_model(folder / str(seed), seed=seed, initializer_range=0.2, max_length=128) for seed in range(3)]


def plain(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture
async def fleet(models: list[Path]) -> AsyncIterator[LocalFleet]:
    def build(index: int) -> TransformersGenerator:
        source = ModelSource(str(models[0]), str(models[0]))
        return TransformersGenerator(TransformersGeneratorOptions(), RoleContext("generator", source, replica=index))

    executor = SerialExecutor("generator", timeout_s=60.0)
    fleet = LocalFleet("generator", build, 2, executor, max_restarts=0)
    await fleet.start()
    yield fleet
    fleet.close()
    executor.stop()


async def sync(fleet: LocalFleet, partial: PartialRollouts, version: int, directory: Path) -> None:
    tensors = list(checkpoint_tensors(plain(directory)))
    for replica in fleet.replicas:
        await replica.loader.begin(version, replica.loader.expected_manifest())
        await replica.loader.load_tensors(tensors)
        await replica.loader.finish()
    await partial.weights_changed()


def greedy_request(name: str, tokens: int) -> RolloutRequest:
    prompt = Prompt(name, np.array([21, 22, 23]), "?")
    sampling = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
    return RolloutRequest(name, ExampleDraw(prompt, 0, name), GenerateRequest(name, prompt.token_ids, sampling, name))


async def one_step(
    partial: PartialRollouts, pending: tuple[Group, ...], step: int, *new: RolloutRequest
) -> tuple[dict[str, Completion], tuple[Group, ...]]:
    rollout_step = partial.begin(pending, new)
    playing = asyncio.create_task(partial.play(rollout_step))
    answers = await asyncio.gather(
        *(rollout_step.completion("generator", request) for request in rollout_step.requests)
    )
    await playing
    ended = {
        request.sample_id: answer
        for request, answer in zip(rollout_step.requests, answers, strict=True)
        if answer is not None
    }
    return ended, (await partial.finish(rollout_step))[0]


@pytest.mark.parametrize("mode", ["resume", "keep"])
async def test_every_token_is_of_the_weights_that_its_span_names(
    mode: str, fleet: LocalFleet, models: list[Path]
) -> None:
    """Greedy: from each version's first token on, a plain forward of that version over all tokens before gives both
    the next token and its logprob.
    """
    settings: dict[str, Any] = {"partial": mode, "in_flight_prompts": 2}
    if mode == "resume":
        settings["round_tokens"] = 5
    config = RunConfig.model_validate(
        {
            "model": {"path": "-"},
            "data": {"train": [{"path": "-"}]},
            "algorithm": {"name": "-"},
            "roles": {},
            "rollout": settings,
            "train": {"steps": 1, "prompts_per_step": 1},
        }
    )
    runtime: Any = SimpleNamespace(generator=lambda role: fleet, data=PlainData())
    rollouts = Rollouts(runtime, RolloutConfig(**settings))
    partial = partial_rollouts(config, rollouts, "generator")
    assert partial is not None
    ended: dict[str, Completion] = {}
    pending: tuple[Group, ...] = ()
    for step in range(3):
        new = [greedy_request(f"short{step}", 4)] + ([greedy_request("long", LONG)] if step == 0 else [])
        done, pending = await one_step(partial, pending, step + 1, *new)
        ended |= done
        if step < 2:
            await sync(fleet, partial, step + 1, models[step + 1])
    while pending:
        await partial.weights_changed()
        done, pending = await one_step(partial, pending, 4)
        ended |= done
    assert pending == ()
    await partial.close()

    long = ended["long"]
    assert len(long.token_ids) == LONG
    if mode == "keep":  # how much is sampled in a step is a matter of timing
        assert {0, 2} <= {span.version for span in long.version_spans}
    else:
        assert [span.version for span in long.version_spans] == [0, 1, 2]
        assert [(span.start, span.stop) for span in long.version_spans] == [(0, 5), (5, 10), (10, LONG)]
    for completion in (long, *(ended[f"short{step}"] for step in range(3))):
        for span in completion.version_spans:
            ids = np.concatenate([[21, 22, 23], completion.token_ids])
            with torch.inference_mode():
                logits = plain(models[span.version])(torch.from_numpy(ids)[None]).logits[0, 2:-1].log_softmax(-1)
            for token in range(span.start, span.stop):
                assert completion.token_ids[token] == int(logits[token].argmax())
                assert completion.logprobs[token] == pytest.approx(float(logits[token].max()), abs=1e-4)


@pytest.fixture
def partial_recipe(recipe: Any) -> Any:
    """Completions of very different lengths, over up to three steps."""
    recipe.content["sampling"] = {"max_tokens": 24, "stop": ["a", "e"]}
    recipe.content["rollout"] = {"partial": "resume", "round_tokens": 6, "max_rounds": 3, "in_flight_prompts": 6}
    recipe.content["algorithm"]["options"] |= {"importance_correction": "truncate"}
    recipe.write()
    return recipe


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    return {}


@pytest.fixture
def expected(undisturbed: dict[str, Any], partial_recipe: Any, chatlearn: Any, result_of: Any) -> Any:
    if not undisturbed:
        folder = partial_recipe.file.parent / "undisturbed"
        finished = chatlearn("run", partial_recipe.file, f"output_dir={folder}")
        assert finished.code == 0, finished.output
        undisturbed["result"] = result_of(folder)
    result = undisturbed["result"]
    assert all(line["rollout/unfinished"] > 0 for line in result.metrics), "something is carried over every sync"
    assert max(line["rollout/staleness_max"] for line in result.metrics) == 2
    return result


@pytest.mark.parametrize(
    "moment",
    [
        "completion:40",  # while unfinished completions are sampled on
        "update:7",
        "half a save:2",  # pending rollouts of a checkpoint that is not whole
    ],
)
def test_a_run_that_was_killed_takes_up_its_unfinished_rollouts(
    moment: str, partial_recipe: Any, chatlearn: Callable[..., Any], result_of: Any, expected: Any
) -> None:
    assert chatlearn("run", partial_recipe.file, PROBE=moment).code == -signal.SIGKILL
    resumed = chatlearn("run", partial_recipe.file)
    assert resumed.code == 0, resumed.output
    assert result_of(partial_recipe.run_dir) == expected


def test_samples_are_counted_once_and_what_is_left_is_told(expected: Any) -> None:
    """Group size 3, and 6 prompts in flight: what was drawn is trained, excluded, or pending at the end."""
    metrics: list[Mapping[str, float]] = expected.metrics
    drawn = 6 + sum(line["rollout/prompts"] for line in metrics[:-1])
    assert 3 * drawn == expected.totals["samples/total"] + metrics[-1]["rollout/pending"]
    assert expected.totals["samples/total"] == expected.totals["samples/trained"] + expected.totals["samples/excluded"]
