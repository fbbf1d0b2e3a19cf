"""Hub datasets, with the library's loading replaced: tests reach no network."""

from __future__ import annotations

from typing import Any

import datasets
import huggingface_hub.constants
import pytest

from chatlearn_core.exceptions import DataError
from chatlearn_data.options import NoOptions
from chatlearn_data.readers.hub import HubReader

ROWS = [{"a": 1}, {"a": 2}]


def read(path: str, split: str | None = None) -> list[Any]:
    return list(HubReader(NoOptions()).rows(path, split))


def test_name_configuration_and_split_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load(name: str, configuration: str | None, *, split: str | None) -> Any:
        calls.append((name, configuration, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read("openai/gsm8k:main", "test") == ROWS
    assert read("owner/name", "train") == ROWS
    assert calls == [("openai/gsm8k", "main", "test"), ("owner/name", None, "train")]


def test_without_a_split_there_must_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: loaded)
    assert read("owner/name") == ROWS
    loaded["test"] = datasets.Dataset.from_list(ROWS)
    with pytest.raises(DataError, match="several splits; set split to one of: train, test"):
        read("owner/name")


def test_failure_names_the_dataset_the_cause_and_being_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub (OfflineModeIsEnabled)\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"(?s)'owner/name' is neither local nor loadable.*ConnectionError: .*HF_HUB_OFFLINE is set"
    ):
        read("owner/name", "test")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(DataError) as caught:
        read("owner/name", "test")
    assert "HF_HUB_OFFLINE" not in str(caught.value)
