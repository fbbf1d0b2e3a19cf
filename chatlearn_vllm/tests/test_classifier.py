"""A sequence classifier in the engine: its scores are those of transformers, and it samples nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from chatlearn_core.exceptions import BackendError, ConfigError, ModelError
from chatlearn_core.types import GenerateRequest, SamplingParams
from chatlearn_vllm.options import VLLMGeneratorOptions


def classifier(model: Path, directory: Path, num_labels: int = 1) -> Any:
    """Write a classifier with random weights, and return it in transformers."""
    plain = AutoModelForSequenceClassification.from_pretrained(model, num_labels=num_labels, dtype=torch.float32).eval()
    torch.nn.init.normal_(plain.score.weight, generator=torch.Generator().manual_seed(1))
    plain.save_pretrained(directory)
    AutoTokenizer.from_pretrained(model).save_pretrained(directory)
    return plain


def asked(name: str, token_ids: list[int], **fields: Any) -> GenerateRequest:
    return GenerateRequest(name, np.array(token_ids), SamplingParams(max_tokens=1), **{"classify": True} | fields)


@pytest.fixture(scope="module")
def served(
    model_dir: Callable[..., Path], make_replica: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Any]]:
    """The replica, and the model in transformers."""
    directory = tmp_path_factory.mktemp("classifier")
    plain = classifier(model_dir(), directory)
    replica = make_replica(directory, runner="classify")
    yield replica, plain
    replica.close()


@pytest.mark.engine
def test_scores_are_those_of_transformers(served: tuple[Any, Any]) -> None:
    """Of several prompts at once, up to the longest that the model takes."""
    import asyncio

    replica, plain = served
    draws = np.random.default_rng(0)
    prompts = [draws.integers(3, 200, length).tolist() for length in (1, 2, 9, 40, 128)]

    async def ask() -> list[Any]:
        requests = [asked(str(number), prompt) for number, prompt in enumerate(prompts)]
        return list(await asyncio.gather(*map(replica.generator.generate, requests)))

    for _ in range(2):  # the second time from the prefix cache, if there is one
        for prompt, completion in zip(prompts, replica.run(ask()), strict=True):
            with torch.no_grad():
                expected = plain(torch.tensor([prompt])).logits.item()
            assert completion.score == pytest.approx(expected, abs=1e-4)
            assert completion.finish_reason == "stop"
            assert len(completion.token_ids) == 0


@pytest.mark.engine
def test_it_samples_nothing_and_names_what_it_refuses(served: tuple[Any, Any]) -> None:
    replica, _ = served
    with pytest.raises(BackendError, match=r"request 'sample': it requests tokens, but .* sequence classifier"):
        replica.run(replica.generator.generate(asked("sample", [5, 6], classify=False)))
    with pytest.raises(BackendError, match=r"request 'long': it has 129 tokens, but the model takes 128"):
        replica.run(replica.generator.generate(asked("long", [5] * 129)))
    assert replica.run(replica.generator.generate(asked("fits", [5, 6]))).score is not None


@pytest.mark.engine
def test_a_classifier_with_several_labels_is_refused(
    model_dir: Callable[..., Path], make_replica: Callable[..., Any], tmp_path: Path
) -> None:
    classifier(model_dir(), tmp_path, num_labels=3)
    with pytest.raises(ModelError, match=r"has 3 labels .* give the role a sequence classifier with one label"):
        make_replica(tmp_path, runner="classify")


def test_options_that_contradict_each_other_are_refused(make_replica: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="a classifier's weights are fixed; remove lora"):
        VLLMGeneratorOptions(runner="classify", lora={"max_rank": 4})
    with pytest.raises(ConfigError, match=r"runner: owned by the backend; set options\.runner"):
        make_replica(tmp_path, engine={"runner": "pooling"})
