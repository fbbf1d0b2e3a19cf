"""Selects the plugin that reads a model's directory, and checks that generators can serve models of its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.records import GeneratorSpec, ModelFamilySpec, TrainerSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import ModelSource
from chatlearn_core.protocols.model_family import ModelFacts, ModelFamily
from chatlearn_core.runtime.plan import RolePlan


def model_family(registry: PluginRegistry, source: ModelSource) -> ModelFamily:
    """The family that a plugin registers for the model's type; if there is none, the family for all types.

    Raises:
        ConfigError: no installed plugin reads model directories, or only families of other types are installed.
        ModelError: there is no readable model configuration.
    """
    records = [record for record in registry.records("model_family") if isinstance(record, ModelFamilySpec)]
    general = next((record for record in records if not record.model_types), None)
    if general is None:
        raise ConfigError(
            "no installed plugin reads model directories of every type (hook chatlearn_model_families, a record "
            "without model_types); install chatlearn-hf"
        )
    family = _built(registry, general)
    # A family that reads as the general one does adds something else, such as layouts for a trainer.
    special = [record for record in records if record.model_types and record.factory != general.factory]
    if not special:
        return family
    model_type = family.model_type(source)
    claims = [record for record in special if model_type in record.model_types]
    if len(claims) > 1:
        raise ConfigError(
            f"the model type {model_type!r} of {source.path} is declared by several model families: "
            f"{', '.join(record.name for record in claims)}. Disable all but one (CHATLEARN_DISABLE_PLUGINS)"
        )
    return _built(registry, claims[0]) if claims else family


def _built(registry: PluginRegistry, record: ModelFamilySpec) -> ModelFamily:
    chosen = registry.select("model_family", record.name, where="model")
    family: ModelFamily = registry.load_factory(chosen)(registry.load_options(chosen)())
    return family


def check_served_families(loaded: LoadedConfig, models: Mapping[str, ModelFacts]) -> None:
    """Check that every generator can serve the type of its model, according to its record.

    Args:
        models: facts about the model of each role that holds one.

    Raises:
        ConfigError: names role, generator, model type and reason.
    """
    for name, facts in models.items():
        record = loaded.plugin("roles", name).record
        if not isinstance(record, GeneratorSpec):
            continue
        model_type = facts.model_type
        refused = dict(record.refuses_families).get(model_type)
        served = record.model_families
        if refused is None and (served is None or model_type in served):
            continue
        reason = refused or f"it serves {', '.join(sorted(served or ())) or 'none'}"
        raise ConfigError(
            f"{loaded.source}, roles.{name}.backend: generator {record.name!r} does not serve models of type "
            f"{model_type!r}: {reason}. Choose another generator or model"
        )


def check_layouts(loaded: LoadedConfig, models: Mapping[str, ModelFacts]) -> None:
    """Check that ranks and options let every trainer train its model, according to ``TrainerSpec.check_model``.

    Raises:
        ConfigError: names role, trainer and everything that does not fit.
    """
    for name, facts in models.items():
        choice = loaded.plugin("roles", name)
        record = choice.record
        if not isinstance(record, TrainerSpec) or record.check_model is None or not facts.config:
            continue
        ranks = loaded.config.roles[name].ranks
        lines = resolve_import_string(record.check_model)(choice.options, facts.config, ranks)
        if lines:
            raise ConfigError(
                f"{loaded.source}, roles.{name}.options: trainer {record.name!r} cannot train this "
                f"{facts.model_type} model over ranks: {ranks} as they say:" + "".join(f"\n  {line}" for line in lines)
            )


def tokenizer_of(registry: PluginRegistry, role: RolePlan) -> Any:
    """The tokenizer of a role's model, with the interface of ``data.Tokenizer``.

    Raises:
        ModelError: there is no tokenizer, or it does not belong to the model.
    """
    assert role.model is not None, f"role {role.name} is planned without a model"
    return model_family(registry, role.model).load_tokenizer(role.model)
