"""Reads a run's configuration from a YAML file and overrides, and checks all of it before anything starts.

The order: YAML, overrides and interpolation (``chatlearn_config``), shape and types (``models``), plugins and their
options (``choices``), rules between settings (``crosscheck``). Every stage continues
with the values that the previous one could use, so that one check reports every problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from chatlearn_config.document import Document, DocumentError, parse, read_text
from chatlearn_config.fields import model_at, valid_keys
from chatlearn_config.interpolation import resolve
from chatlearn_config.overrides import apply_overrides
from chatlearn_config.partial import is_consequence, validate
from chatlearn_config.problems import (
    KeyPath,
    Problem,
    render,
    unknown_key,
)
from chatlearn_config.unusable import unusable_values
from chatlearn_core.config.choices import SelectedPlugin, choose
from chatlearn_core.config.crosscheck import cautions, crosscheck
from chatlearn_core.config.invalid import InvalidConfigError
from chatlearn_core.config.models import RunConfig
from chatlearn_core.config.rules.checked import Checked
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.registry import PluginRegistry

TEXT_SOURCE = "<text>"
SECTIONS = ("model", "data", "algorithm", "roles", "train")
"""The sections that every configuration has."""


_PLACEHOLDERS: dict[str, Any] = {
    "model": {"path": "placeholder"},
    "data": {"train": [{"path": "placeholder"}]},
    "algorithm": {"name": "placeholder"},
    "roles": {},
    "train": {"steps": 1, "prompts_per_step": 1},
}
"""Replacements for required sections that are missing or broken, so that the other sections can still be checked."""


@dataclass(slots=True, frozen=True)
class LoadedConfig:
    """A valid configuration and the plugins it chose."""

    config: RunConfig
    resolved: dict[str, Any]
    """The plain values as written, overridden and resolved; defaults are not filled in."""
    written: dict[str, Any]
    """The values before interpolations were resolved."""
    source: str
    """The file's name as given; ``<text>`` for text."""
    choices: Mapping[str, SelectedPlugin]
    """Every chosen plugin with its validated options, by the dotted path of the section that chose it: ``algorithm``,
    ``roles.trainer``, ``roles.reward.parts.0``, ``weight_sync`` (absent under ``auto``), ``runtime``,
    ``log.loggers.0``, ``data.train.0`` (absent under ``auto``)."""
    warnings: tuple[str, ...] = ()
    """Warnings about settings that are allowed but probably unintended, each with its place; shown when the run starts.
    """

    def chosen(self, *path: str | int) -> SelectedPlugin | None:
        """The plugin chosen at a path, such as ``chosen("roles", "trainer")``; None if no plugin is chosen there."""
        return self.choices.get(".".join(str(part) for part in path))

    def plugin(self, *path: str | int) -> SelectedPlugin:
        """Like ``chosen``, for paths where every valid configuration chooses a plugin: a trainer's backend, a
        runtime."""
        choice = self.chosen(*path)
        assert choice is not None, f"validation lets no configuration through that chooses nothing at {path}"
        return choice


def load_config(
    path_or_text: Path | str, overrides: Sequence[str] = (), registry: PluginRegistry | None = None
) -> LoadedConfig:
    """Load, resolve and check a configuration.

    Relative paths inside it stay as they are: they are relative to the working directory of the run, not to the file.

    Args:
        path_or_text: A file, or YAML text. A newline marks YAML text.
        overrides: ``key=value`` and ``~key`` in order, see ``chatlearn_config.overrides``.
        registry: The plugins to choose from; by default all that are installed.

    Raises:
        InvalidConfigError: rules are broken; the message lists all problems, each with file and line or override, key,
            value, rule and remedy.
        ConfigError: the file cannot be read, or is not a YAML mapping.
    """
    document = _read(path_or_text)
    source = document.marks.source
    apply_overrides(document, overrides)
    resolved, unresolved, tainted = resolve(document.values, RunConfig)
    problems = [*document.problems, *unresolved]
    tainted += document.unreadable
    unusable = [problem for problem in unusable_values(resolved) if not is_consequence(problem, tainted)]
    problems += unusable
    tainted += [problem.path for problem in unusable]

    config, invalid = validate(resolved, RunConfig, _PLACEHOLDERS, tainted)
    registry = discover_plugins() if registry is None else registry
    choices = choose(resolved, registry, document.marks)
    problems += _explained(invalid, choices.models)
    problems += [problem for problem in choices.problems if not is_consequence(problem, tainted)]
    tainted += [problem.path for problem in choices.problems]
    warnings: list[Problem] = []
    if config is not None:
        checked = Checked(config, choices, registry.records("weight_sync"))
        warnings, conflicts = cautions(checked), crosscheck(checked)
        problems += [problem for problem in conflicts if not is_consequence(problem, tainted)]
    if problems:
        raise InvalidConfigError(source, problems, document.marks)
    assert config is not None
    told = tuple(render(warning, document.marks) for warning in warnings)
    return LoadedConfig(config, resolved, document.values, source, choices.selected, told)


def _read(path_or_text: Path | str) -> Document:
    try:
        if isinstance(path_or_text, str) and "\n" in path_or_text:
            return parse(path_or_text, TEXT_SOURCE, SECTIONS)
        return parse(read_text(Path(path_or_text)), str(path_or_text), SECTIONS)
    except DocumentError as error:
        raise ConfigError(str(error)) from error


def _explained(problems: Iterable[Problem], models: Mapping[KeyPath, type[BaseModel]]) -> list[Problem]:
    """Explain unknown keys beside ``options`` that are options of the chosen plugin: say where they belong."""
    result = []
    for problem in problems:
        section, key = problem.path[:-1], problem.path[-1] if problem.path else None
        model = models.get(section)
        if problem.rule == "unknown key" and model is not None and key in valid_keys(model):
            run_section = model_at(RunConfig, section)
            told = unknown_key(
                problem.path,
                problem.value,
                valid_keys(run_section) if run_section else [],
                elsewhere=f"it is one of the backend's options: move it below '{'.'.join(map(str, section))}.options'",
            )
            problem = replace(problem, remedy=told.remedy)
        result.append(problem)
    return result
