"""Samples as a generator would make them, and the context a runtime would give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import RAW_BASIS, Completion, Prompt, Sample, SamplingParams, sample_from_completion


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    def make(text: str, ground_truth: Any = None, index: int = 0, **columns: Any) -> Sample:
        prompt = Prompt(
            id=f"p{index}",
            token_ids=np.array([1, 2], dtype=np.int64),
            text="What is it?",
            data_source="tests",
            ground_truth=ground_truth,
            messages=({"role": "user", "content": "What is it?"},),
            columns=columns,
        )
        completion = Completion(
            request_id=f"p{index}@0#0",
            token_ids=np.array([3, 4, 5], dtype=np.int64),
            logprobs=np.zeros(3, dtype=np.float32),
            basis=RAW_BASIS,
            finish_reason="stop",
            sampling=SamplingParams(max_tokens=8),
            version_spans=(),
            text=text,
        )
        return sample_from_completion(f"p{index}@0#0", f"p{index}@0", prompt, completion)

    return make


@pytest.fixture
def context() -> RoleContext:
    return RoleContext(role="reward")


@pytest.fixture
def use(context):
    """Set a reward up and close it after the test."""
    opened = []

    def make(factory: Any, options: Any) -> Any:
        reward = factory(options, context)
        opened.append(reward)
        reward.setup()
        return reward

    yield make
    for reward in opened:
        reward.close()
        reward.close()


@pytest.fixture
def write_module(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, source: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return path

    return write
