"""Selection of an aggregation by name among those that plugins register."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.select import load_callable
from chatlearn_core.protocols.aggregation import Aggregation


def select_aggregation(registry: PluginRegistry, name: str, options: Mapping[str, Any]) -> Aggregation:
    """The aggregation named in an algorithm's options.

    Raises:
        PluginError: no usable plugin registers it; names what is installed.
        ConfigError: the aggregation rejects the options.
    """
    record = registry.select("aggregation", name, where="algorithm.options.aggregation")
    try:
        validated = registry.load_options(record)(**options)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"algorithm.options.aggregation_options.{place}: {first['msg']}, for aggregation {name!r}; it takes "
            f"{', '.join(registry.load_options(record).model_fields) or 'no options'}"
        ) from error
    function = load_callable(record, "function", registry.origin(record))
    return Aggregation(name, function, validated, record.loss_unit, record.reads)
