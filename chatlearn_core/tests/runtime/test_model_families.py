from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.records import GeneratorSpec, ModelFamilySpec
from chatlearn_core.protocols import ModelSource
from chatlearn_core.protocols.model_family import ModelFacts
from chatlearn_core.runtime.model_families import check_served_families, model_family

GENERATOR = GeneratorSpec(name="acme", factory="acme.generator:Generator", options="acme.options:Options")
GENERAL = ModelFamilySpec(name="hf", factory="general", options="options")
SOURCE = ModelSource("models/tiny", "models/tiny")


def loaded(record: GeneratorSpec) -> Any:
    return SimpleNamespace(source="run.yaml", plugin=lambda *_: SimpleNamespace(record=record))


@pytest.mark.parametrize("families", [None, frozenset({"qwen3", "llama"})])
def test_a_type_that_a_generator_serves_passes(families: frozenset[str] | None) -> None:
    record = replace(GENERATOR, model_families=families)
    check_served_families(loaded(record), {"sampler": ModelFacts("qwen3", 64, 8)})


def test_a_type_that_a_generator_does_not_serve_is_refused_with_those_it_serves() -> None:
    record = replace(GENERATOR, model_families=frozenset({"qwen3", "llama"}))
    with pytest.raises(ConfigError, match=r"roles\.sampler\.backend: .* 'mamba': it serves llama, qwen3"):
        check_served_families(loaded(record), {"sampler": ModelFacts("mamba", 64, 8)})


def test_a_type_that_a_generator_refuses_is_refused_for_the_reason_it_gives() -> None:
    record = replace(GENERATOR, refuses_families=(("mamba", "its state cannot be cut"),))
    with pytest.raises(ConfigError, match="'mamba': its state cannot be cut"):
        check_served_families(loaded(record), {"sampler": ModelFacts("mamba", 64, 8)})


class Registry:
    """Families that say of every directory which type its model is, and their own name."""

    def __init__(self, *records: ModelFamilySpec, model_type: str = "acme_moe") -> None:
        self.by_name = {record.name: record for record in records}
        self.model_type = model_type

    def records(self, kind: str) -> list[ModelFamilySpec]:
        assert kind == "model_family"
        return list(self.by_name.values())

    def select(self, kind: str, name: str, where: str) -> ModelFamilySpec:
        return self.by_name[name]

    def load_options(self, record: ModelFamilySpec) -> Any:
        return SimpleNamespace

    def load_factory(self, record: ModelFamilySpec) -> Any:
        return lambda _: SimpleNamespace(name=record.name, model_type=lambda _: self.model_type)


ACME = ModelFamilySpec(name="acme", factory="special", options="options", model_types=frozenset({"acme_moe"}))


@pytest.mark.parametrize(("model_type", "name"), [("acme_moe", "acme"), ("qwen3", "hf")])
def test_a_family_that_declares_the_models_type_reads_it(model_type: str, name: str) -> None:
    family: Any = model_family(Registry(ACME, GENERAL, model_type=model_type), SOURCE)  # type: ignore[arg-type]  # what is used
    assert family.name == name


def test_two_families_of_one_type_are_an_error_that_names_both() -> None:
    with pytest.raises(ConfigError, match=r"'acme_moe' of models/tiny is declared by several.*: acme, other"):
        model_family(Registry(ACME, replace(ACME, name="other"), GENERAL), SOURCE)  # type: ignore[arg-type]  # what is used


def test_without_a_general_family_the_remedy_is_named() -> None:
    with pytest.raises(ConfigError, match="install chatlearn-hf"):
        model_family(Registry(ACME), SOURCE)  # type: ignore[arg-type]  # what is used
