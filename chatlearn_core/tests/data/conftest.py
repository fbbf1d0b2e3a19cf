"""A tokenizer with one token a character, a dataset plugin, and files to read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from chatlearn_core.config.models import DataConfig
from chatlearn_core.data import RawExample
from chatlearn_core.exceptions import DataError
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.records import DatasetSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_data.plugin import chatlearn_datasets
from chatlearn_testing.fakes.tokenizer import CharacterTokenizer

TEXT_READERS = [spec for spec in chatlearn_datasets() if spec.reads & {".csv", ".json", ".jsonl"}]


class PlainOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    answer: str = "required"


class PlainFormat:
    """``prompt``, ``answer``, ``completion``, ``id``; raises KeyError where there is no prompt."""

    answer_columns = ("answer",)
    completion_columns = ("completion",)

    def __init__(self, options: PlainOptions) -> None:
        self.answer_required = options.answer == "required"

    def parse(self, row: Mapping[str, Any]) -> RawExample:
        if row.get("kind") == "odd":
            raise DataError("odd rows are refused")
        return RawExample(
            row["prompt"],
            row.get("completion"),
            row.get("answer"),
            row.get("source"),
            row.get("id"),
            dict(row),
            imitates_prompt=row.get("imitates_prompt", False),
            completions=row.get("completions", ()),
            ranks=row.get("ranks", ()),
            labels=row.get("labels", ()),
        )


class DoublingReader:
    """A file ``n.rows`` has twice as many rows as its content says."""

    def __init__(self, options: PlainOptions) -> None:
        del options

    def rows(self, path: str, split: str | None) -> Any:
        for number in range(2 * int(Path(path).read_text())):
            yield {"prompt": f"row {number}", "answer": number}


def dataset_spec(name: str, factory: str = "PlainFormat", **fields: Any) -> DatasetSpec:
    return DatasetSpec(
        name=name, factory=f"plain_dataset_plugin:{factory}", options="plain_dataset_plugin:PlainOptions", **fields
    )


def registry_of(*specs: DatasetSpec) -> PluginRegistry:
    return PluginRegistry(
        tuple(
            PluginEntry(name=s.name, kind="dataset", distribution="plain", version="1.0", status="ok", record=s)
            for s in specs
        )
    )


@pytest.fixture
def make_registry(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PluginRegistry]:
    """``make_registry((name, {field: value}), ...)``: a registry of formats and readers that can be imported."""
    module = ModuleType("plain_dataset_plugin")
    for member in (PlainOptions, PlainFormat, DoublingReader):
        setattr(module, member.__name__, member)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return lambda *specs: registry_of(*(dataset_spec(name, **fields) for name, fields in specs))


@pytest.fixture
def plugins(make_registry: Callable[..., PluginRegistry]) -> PluginRegistry:
    registry = make_registry(
        ("plain", {"columns": frozenset({"prompt"})}),
        ("doubling", {"factory": "DoublingReader", "reads": frozenset({".rows"})}),
    )
    return PluginRegistry((*registry.entries, *registry_of(*TEXT_READERS).entries))


@pytest.fixture
def tokenizer() -> CharacterTokenizer:
    return CharacterTokenizer()


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """``write_rows(rows, name)``: a JSON Lines file; text rows are written as they are."""

    def write(rows: Sequence[Any], name: str = "train.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def data_config() -> Callable[..., DataConfig]:
    """``data_config(path, ..., key=value)``: a data section with these training datasets."""

    def build(*paths: Any, **fields: Any) -> DataConfig:
        train = [{"path": path} if isinstance(path, str) else path for path in paths]
        return DataConfig.model_validate({"train": train, **fields})

    return build
