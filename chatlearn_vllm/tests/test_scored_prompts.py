"""The table that replaces the model runner's, on a stand-in for the runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chatlearn_vllm.engine_side.scored_prompts import TEMPERATURE, install


class Sampler:
    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1)


def runner(**temperatures: float | None) -> Any:
    requests = {
        name: SimpleNamespace(
            sampling_params=SimpleNamespace(extra_args=None if value is None else {TEMPERATURE: value})
        )
        for name, value in temperatures.items()
    }
    return SimpleNamespace(requests=requests, num_prompt_logprobs={}, sampler=Sampler())


def test_each_requests_logits_are_divided_by_its_temperature() -> None:
    model_runner = runner(cold=0.5, plain=1.0, other=None)
    assert install(model_runner)
    table = model_runner.num_prompt_logprobs
    table |= {"cold": 0, "plain": 0, "other": 3}
    logits = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = {}
    for request_id, count in table.items():
        found[request_id] = model_runner.sampler.compute_logprobs(logits)
        assert count == (3 if request_id == "other" else 0)
    torch.testing.assert_close(found["cold"], (logits / 0.5).log_softmax(-1))
    for request_id in ("plain", "other"):
        torch.testing.assert_close(found[request_id], logits.log_softmax(-1))
    # Sampled tokens, whose logits vLLM has divided itself, go through the same function.
    torch.testing.assert_close(model_runner.sampler.compute_logprobs(logits), logits.log_softmax(-1))


def test_a_runner_of_another_form_is_refused_and_the_second_generation_is_left_alone() -> None:
    assert not install(SimpleNamespace(prompt_logprobs_worker=None))
    with pytest.raises(RuntimeError, match="this vLLM version is not supported"):
        install(SimpleNamespace(requests={}, sampler=Sampler()))
