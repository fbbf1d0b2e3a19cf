"""Selects the plugins of a dataset: the format that it names or that fits its columns, and the installed readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError

from chatlearn_core.data.format import DatasetFormat, Row
from chatlearn_core.data.reader import RowReader
from chatlearn_core.exceptions import ConfigError, DataError
from chatlearn_core.plugins.records import DatasetSpec
from chatlearn_core.plugins.registry import PluginRegistry


def row_readers(plugins: PluginRegistry) -> dict[str, Callable[[], RowReader]]:
    """File suffix, or ``hub`` -> function that builds the reader."""
    return {
        source: partial(_build, plugins, spec, {}, f"reader of {source}")
        for spec in plugins.records("dataset")
        for source in spec.reads
    }


def select_format(plugins: PluginRegistry, name: str, options: Mapping[str, Any], where: str) -> DatasetFormat:
    """Build the format ``name``; ``where`` is the configuration key of the dataset.

    Raises:
        PluginError: there is no such format, or its code cannot be used.
        ConfigError: it is a reader of files, or its options model rejects ``options``.
    """
    spec = plugins.select("dataset", name, f"{where}.format")
    if spec.reads:
        raise ConfigError(
            f"{where}.format is '{name}', which reads files ({', '.join(sorted(spec.reads))}) but is no format of "
            f"their rows.\n  Set {where}.format to auto, or to the format of the rows; files are recognised by suffix."
        )
    built: DatasetFormat = _build(plugins, spec, options, where)
    return built


def detect_format(plugins: PluginRegistry, row: Row, where: str) -> str:
    """Name of the most specific format all of whose columns ``row`` has.

    Raises:
        DataError: no format fits, or two fit equally well.
    """
    specs = [spec for spec in plugins.records("dataset") if spec.columns]
    fitting = [spec for spec in specs if spec.columns <= row.keys()]
    best = max((len(spec.columns) for spec in fitting), default=0)
    names = sorted(spec.name for spec in fitting if len(spec.columns) == best)
    if len(names) == 1:
        return names[0]
    if names:
        raise DataError(
            f"columns {sorted(row)} fit the dataset formats {' and '.join(names)} equally well.\n"
            f"  Set {where}.format to one of them."
        )
    known = "".join(f"    {spec.name}: {', '.join(sorted(spec.columns))}\n" for spec in specs)
    raise DataError(
        f"no dataset format fits the columns {sorted(row)}. Formats are recognised by:\n"
        f"{known or '    (no format is installed)'}"
        f"  Set {where}.format to 'keys' and name the columns in {where}.options (input_key, label_key)."
    )


def _build(plugins: PluginRegistry, spec: DatasetSpec, options: Mapping[str, Any], where: str) -> Any:
    model = plugins.load_options(spec)
    try:
        checked = model.model_validate(dict(options))
    except ValidationError as error:
        lines = "\n".join(
            f"  {'.'.join([where, 'options', *map(str, problem['loc'])])}: {problem['msg']} (is {problem['input']!r})"
            for problem in error.errors()
        )
        known = ", ".join(model.model_fields) or "none"
        raise ConfigError(
            f"Options of the dataset format '{spec.name}' are wrong:\n{lines}\n  It takes: {known}."
        ) from error
    return plugins.load_factory(spec)(checked)
