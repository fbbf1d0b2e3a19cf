"""The models on which families are tested, and what the suites of families share."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols import ModelSource
from chatlearn_core.protocols.model_family import ModelFamily
from chatlearn_testing.suites.conformance_suite import ConformanceSuite

CONFIG_FILE = "config.json"
BuildModel = Callable[[Path], Path]


@dataclass(slots=True, frozen=True)
class ModelCase:
    """A small model of one type, and what the family must say of it."""

    model_type: str
    build: BuildModel | str
    """``(directory) -> directory``, or its import string: writes a model directory with ``config.json`` and a
    tokenizer; and weights in safetensors if the record has layouts, or if the family looks at them."""
    vocab_size: int
    max_length: int
    text: str = "abba"
    """A text that the tokenizer takes: decoding its tokens gives it back."""


@dataclass(slots=True, frozen=True)
class BuiltModel:
    """A case and its model directory."""

    case: ModelCase
    directory: Path

    @property
    def source(self) -> ModelSource:
        return ModelSource(str(self.directory), str(self.directory))

    def copy(self, target: Path) -> Path:
        """Copy the model directory to ``target``; returns it."""
        shutil.copytree(self.directory, target)
        return target


class ModelFamilySuite(ConformanceSuite):
    """Builds the models of the cases once for all tests."""

    kind: ClassVar[Kind] = "model_family"
    settable: ClassVar[frozenset[str]] = ConformanceSuite.settable | {"cases", "has_tokenizer_files"}
    cases: ClassVar[Sequence[ModelCase]]
    has_tokenizer_files: ClassVar[bool] = True
    """False for a family whose tokenizer follows from the model's configuration, without files of its own."""

    @pytest.fixture(scope="class")
    @classmethod
    def models(cls, tmp_path_factory: pytest.TempPathFactory) -> Sequence[BuiltModel]:
        """The cases' models."""
        root, built = tmp_path_factory.mktemp("models"), []
        for number, case in enumerate(cls.cases):
            build: Any = resolve_import_string(case.build) if isinstance(case.build, str) else case.build
            built.append(BuiltModel(case, build(root / f"{number}-{case.model_type}")))
        return built

    @pytest.fixture(autouse=True)
    def _the_models_stay_as_they_are(self, models: Sequence[BuiltModel]) -> Iterator[None]:
        """Fail a test after which a model directory differs: a family only reads."""
        before = [_content(model.directory) for model in models]
        yield
        for model, content in zip(models, before, strict=True):
            found = _content(model.directory)
            changed = sorted(name for name in found.keys() | content.keys() if found.get(name) != content.get(name))
            assert not changed, f"changed in the model directory of type {model.case.model_type!r}: {changed[:3]}"

    def _family(self) -> ModelFamily:
        family: ModelFamily = self.build()(self.make_options())
        return family


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of a model directory's ``config.json``."""
    content: dict[str, Any] = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    return content


def write_config(directory: Path, content: Mapping[str, Any]) -> None:
    """Replace ``config.json``."""
    (directory / CONFIG_FILE).write_text(json.dumps(content), encoding="utf-8")


def _content(directory: Path) -> dict[str, str]:
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in directory.rglob("*")
        if file.is_file()
    }
