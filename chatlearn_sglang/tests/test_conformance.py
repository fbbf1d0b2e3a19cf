"""The generator ``sglang`` passes the conformance suite, on one real engine that its replicas share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from chatlearn_sglang.conformance import PYTHON_VARIABLE
from chatlearn_testing.suites import GeneratorConformance


@pytest.fixture(scope="class")
def model_directory(
    model_dir: Callable[..., Path], sglang_python: str, share_engines: None, leased_engines: Any
) -> Iterator[Path]:
    yield model_dir()
    leased_engines.close_all()  # the suite looks for what it leaves


@pytest.mark.engine
class TestSGLang(GeneratorConformance):
    backend = "sglang"
    options: ClassVar[dict[str, Any]] = {"python": os.environ[PYTHON_VARIABLE]}
    load_reference = "chatlearn_hf.plain_forward:load_plain_model"
