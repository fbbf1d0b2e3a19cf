"""Writes a new plugin's package from a template: ``chatlearn plugins new``.

The templates are ordinary Python packages in ``template/<kind>``, named ``acme``; a new plugin is a copy with other
names. The templates are part of this package, so that editable installs, wheels and sdists all contain them without a
build step; ``plugins/template`` in the repository is a link to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from packaging.utils import canonicalize_name

from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.sources import did_you_mean
from chatlearn_core.plugins.validation import name_problem


class TemplateKind(StrEnum):
    """Kinds of plugins with a template; a ``reader`` is a dataset that reads files (``DatasetSpec.reads``)."""

    trainer = "trainer"
    generator = "generator"
    reward = "reward"
    weight_sync = "weight_sync"
    algorithm = "algorithm"
    dataset = "dataset"
    logger = "logger"
    sampler = "sampler"
    environment = "environment"
    tool = "tool"
    launcher = "launcher"
    model_family = "model_family"
    schedule = "schedule"
    step_policy = "step_policy"
    sample_filter = "sample_filter"
    aggregation = "aggregation"
    example_kind = "example_kind"
    flow_method = "flow_method"
    output = "output"
    reader = "reader"
    cli_command = "cli_command"
    rollout_mode = "rollout_mode"


TEMPLATE_KINDS = tuple(kind.value for kind in TemplateKind)

PLACEHOLDER = re.compile("acme-plugin|acme_plugin|acme|Acme")
"""Distribution, import name, plugin name and class prefix in the templates; replaced in one pass."""

DISTRIBUTION_NAME = re.compile(r"[a-z]([a-z0-9]|[-_.](?=[a-z0-9]))*", re.IGNORECASE)
"""A distribution name of PEP 508 that starts with a letter, so that the import name derived from it is valid."""


@dataclass(slots=True, frozen=True)
class PackageNames:
    """The names of a new package, its plugin and its classes."""

    distribution: str
    """Distribution name for pip, such as ``acme-reward``."""
    package: str
    """Import name, such as ``acme_reward``."""
    plugin: str
    """Name that a configuration selects, such as ``acme``."""
    class_prefix: str
    """Prefix of class names, such as ``Acme``."""

    @classmethod
    def of(cls, name: str, kind: str) -> PackageNames:
        """Derive all names from the distribution name; the plugin name omits ``chatlearn`` and the kind.

        Raises:
            PluginError: the distribution, package or plugin name would be invalid; says why.
        """
        if not DISTRIBUTION_NAME.fullmatch(name):
            raise PluginError(
                f"{name!r} is not a valid distribution name: use letters, digits and single '-', '_' or '.', starting "
                "with a letter, such as 'acme-reward'."
            )
        distribution = str(canonicalize_name(name))
        package = distribution.replace("-", "_")
        words = distribution.split("-")
        own = strip_words(words, {"chatlearn"}, {word for part in kind.split("_") for word in (part, f"{part}s")})
        plugin = "_".join(own)
        if problem := name_problem(plugin):
            raise PluginError(f"{name!r} would give the plugin an invalid name: {problem}. Choose another name.")
        prefix = "".join(word.capitalize() for word in own)
        if iskeyword(package) or not prefix.isidentifier():
            raise PluginError(f"{name!r} would give the package {package!r} and classes {prefix!r}...; choose another.")
        return cls(distribution, package, plugin, prefix)

    def replace_in(self, text: str) -> str:
        """Return a template's text or path with these names."""
        replacements = {
            "acme-plugin": self.distribution,
            "acme_plugin": self.package,
            "acme": self.plugin,
            "Acme": self.class_prefix,
        }
        return PLACEHOLDER.sub(lambda match: replacements[match.group()], text)


def write_plugin(name: str, kind: str, directory: Path) -> tuple[PackageNames, list[Path]]:
    """Write a package for a plugin of ``kind`` into a new folder of ``directory``.

    Returns:
        Its names, and the files written.

    Raises:
        PluginError: no template of that kind exists, the name is invalid or taken, or the folder exists.
    """
    if kind not in TEMPLATE_KINDS:
        raise PluginError(
            f"No template exists for plugins of kind {kind!r}; templates exist for {', '.join(TEMPLATE_KINDS)}."
            + did_you_mean(kind, TEMPLATE_KINDS)
        )
    names = PackageNames.of(name, kind)
    if taken := taken_by(names):
        raise PluginError(f"{name!r} is taken: {taken}. Choose another name.")
    root = directory / names.distribution
    if root.exists() or root.is_symlink():
        raise PluginError(f"{root} exists already; nothing was written. Remove it, or give another --directory.")
    written = []
    for relative, source in template_files(kind):
        target = root / names.replace_in(relative)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(names.replace_in(source.read_text(encoding="utf-8")), encoding="utf-8")
        except OSError as error:
            raise PluginError(f"{target} cannot be written: {error.strerror}; give another --directory.") from error
        written.append(target)
    return names, written


def template_files(kind: str) -> Iterator[tuple[str, Traversable]]:
    """Yield (path in the new package, file) for every file in the template of a kind."""
    templates = resources.files("chatlearn_testing") / "template"
    yield "LICENSE", templates / "LICENSE"
    yield from files_below(templates / kind)


def files_below(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    """Yield (path, file) of every file below a folder, sorted by name; skips bytecode caches."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_file():
            yield prefix + entry.name, entry
        elif entry.name.isidentifier() and entry.name != "__pycache__":
            yield from files_below(entry, f"{prefix}{entry.name}/")


def taken_by(names: PackageNames) -> str:
    """Describe the installed distribution or package of the same name; empty if there is none."""
    try:
        found = metadata.distribution(names.distribution)
    except metadata.PackageNotFoundError:
        return f"a package {names.package!r} can be imported already" if find_spec(names.package) else ""
    return f"{found.metadata['Name']} {found.version} is installed"


def strip_words(words: list[str], leading: Iterable[str], trailing: Iterable[str]) -> list[str]:
    """Remove ``leading`` words from the start and ``trailing`` words from the end; always keep one word."""
    first, last = set(leading), set(trailing)
    while len(words) > 1 and words[0] in first:
        words = words[1:]
    while len(words) > 1 and words[-1] in last:
        words = words[:-1]
    return words
