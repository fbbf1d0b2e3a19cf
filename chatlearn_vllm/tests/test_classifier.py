"""A sequence classifier in the engine: what the conformance suite cannot see of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from chatlearn_core.exceptions import ConfigError, ModelError
from chatlearn_hf.tiny import build_tiny_classifier
from chatlearn_vllm.options import VLLMGeneratorOptions


@pytest.mark.engine
def test_a_classifier_with_several_labels_is_refused(make_replica: Callable[..., Any], tmp_path: Path) -> None:
    build_tiny_classifier(tmp_path, hidden=128, num_labels=3)
    with pytest.raises(ModelError, match=r"has 3 labels .* give the role a sequence classifier with one label"):
        make_replica(tmp_path, runner="classify")


def test_options_that_contradict_each_other_are_refused(make_replica: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="a classifier's weights are fixed; remove lora"):
        VLLMGeneratorOptions(runner="classify", lora={"max_rank": 4})
    with pytest.raises(ConfigError, match=r"runner: owned by the backend; set options\.runner"):
        make_replica(tmp_path, engine={"runner": "pooling"})
