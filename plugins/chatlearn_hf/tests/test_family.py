"""The family of every directory that transformers can read, and what it says of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatlearn_core.exceptions import ModelError
from chatlearn_core.protocols import ModelSource
from chatlearn_hf.family import TransformersFamily
from chatlearn_hf.options import TransformersFamilyOptions
from chatlearn_hf.tiny import build_tiny_model

COMMITS = ("0" * 39 + "1", "0" * 39 + "2")


def model_type(directory: Path) -> str:
    return TransformersFamily(TransformersFamilyOptions()).model_type(ModelSource(str(directory), str(directory)))


def test_the_type_of_a_model_that_transformers_reads(tmp_path: Path) -> None:
    assert model_type(build_tiny_model(tmp_path, "llama", hidden=16, layers=1)) == "llama"


def test_a_type_that_transformers_does_not_know_is_named_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "acme_moe", "experts": 3}))
    assert model_type(tmp_path) == "acme_moe"


@pytest.mark.parametrize("content", ["{}", '{"model_type": ""}', '{"model_type": 3}'])
def test_a_configuration_without_a_type_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match="which names no type"):
        model_type(tmp_path)


def test_a_path_that_is_no_directory_is_refused() -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        model_type(Path("/nowhere/model"))


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with two commits of acme/tiny, of which ``main`` is the first; the network is off."""
    repository = tmp_path / "hub" / "models--acme--tiny"
    for seed, commit in enumerate(COMMITS):
        build_tiny_model(repository / "snapshots" / commit, "llama", hidden=16, layers=1, seed=seed)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMITS[0])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return repository


def snapshot_of(path: str) -> str | None:
    return TransformersFamily(TransformersFamilyOptions()).facts(ModelSource(path, path)).snapshot


def test_the_snapshot_of_a_hub_id_is_the_directory_of_its_commit(hub_cache: Path) -> None:
    assert snapshot_of("acme/tiny") == str(hub_cache / "snapshots" / COMMITS[0])
    (hub_cache / "refs" / "main").write_text(COMMITS[1])
    assert snapshot_of("acme/tiny") == str(hub_cache / "snapshots" / COMMITS[1])


def test_a_snapshot_without_its_weights_is_none(hub_cache: Path) -> None:
    (hub_cache / "snapshots" / COMMITS[0] / "model.safetensors").unlink()
    assert snapshot_of("acme/tiny") is None


def test_a_directory_has_no_snapshot(tmp_path: Path) -> None:
    assert snapshot_of(str(build_tiny_model(tmp_path, "llama", hidden=16, layers=1))) is None
