"""Every distribution builds a wheel that an index would take and that works where only it is installed."""

from __future__ import annotations

import ast
import email
import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from email.message import Message
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PROJECTS = sorted(
    [ROOT]
    + [file.parent for file in ROOT.glob("chatlearn_*/pyproject.toml")]
    + [file.parent for file in ROOT.glob("plugins/chatlearn_*/pyproject.toml")]
)

SANDBOX_FILES = {"chatlearn-rewards": {"code_wire"}}
"""Files of a distribution that its scripts import by name, since they lie side by side in the sandbox."""
ENGINES = {"chatlearn-vllm": "vllm", "chatlearn-sglang": "sglang"}
"""Imported in the interpreter that holds the engine, which may be another one."""
COMPANIONS = {"mcp-types": "mcp", "pydantic-core": "pydantic"}
"""Distributions that come with another, which pins them."""
LIBRARIES = {
    "chatlearn-chat",
    "chatlearn-config",
    "chatlearn-generator-kit",
    "chatlearn-hosting",
    "chatlearn-losses",
    "chatlearn-runtime-kit",
    "chatlearn-sandbox",
    "chatlearn-trainer-kit",
    "chatlearn-trial",
    "chatlearn-workers",
}
"""Distributions that register nothing."""
CACHES = {"__pycache__", ".ruff_cache", ".mypy_cache", ".pytest_cache"}
PROVIDERS = metadata.packages_distributions()
REPORT = (
    "-c",
    "import json; from chatlearn_core.plugins.loader import discover_plugins; "
    "print(json.dumps({'plugins': [{'name': e.name, 'distribution': e.distribution, 'version': e.version, "
    "'status': e.status, 'reason': e.reason} for e in discover_plugins().entries]}))",
)
"""Lists plugins where there is no command line."""
COMMAND = ("-m", "chatlearn_cli", "plugins", "list", "--json")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel by distribution name; built by the backend that the projects name, without a network."""
    folder = tmp_path_factory.mktemp("wheels")
    for project in PROJECTS:
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
            cwd=project,
            capture_output=True,
            text=True,
            check=True,
        )
    return {file.name.split("-")[0].replace("_", "-"): file for file in folder.glob("*.whl")}


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_string(archive.read(name).decode())


def test_there_is_one_for_every_project(wheels: dict[str, Path]) -> None:
    assert len(wheels) == len(PROJECTS)
    assert {"chatlearn", "chatlearn-core", "chatlearn-fsdp", "chatlearn-transformers"} <= wheels.keys()


def test_metadata_is_what_an_index_accepts(wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        metadata = metadata_of(wheel)
        assert metadata["Name"] == name
        assert metadata["Version"]
        assert metadata["Summary"], name
        assert metadata["License-Expression"] == "Apache-2.0", name
        assert metadata["Requires-Python"] == ">=3.11", name
        assert metadata["Description-Content-Type"] == "text/markdown", name
        assert len(metadata.get_payload()) > 100, f"{name}: the README is the description"
        classifiers = metadata.get_all("Classifier") or []
        assert any(text.startswith("Programming Language :: Python :: 3") for text in classifiers), name
        assert not any(text.startswith("License ::") for text in classifiers), "replaced by License-Expression"
        with zipfile.ZipFile(wheel) as archive:
            assert any("/licenses/LICENSE" in entry for entry in archive.namelist()), name


def test_ours_depend_on_each_other_by_ranges_that_include_this_version(wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        for text in metadata_of(wheel).get_all("Requires-Dist") or []:
            requirement = Requirement(text)
            if requirement.name in wheels:
                version = metadata_of(wheels[requirement.name])["Version"]
                # An extra adds to a requirement that is pinned above it.
                assert requirement.specifier or requirement.marker, f"{name}: {text}"
                assert requirement.specifier.contains(version), f"{name}: {text}"


def test_packages_are_typed_and_hold_no_tests(wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            entries = archive.namelist()
        if name == "chatlearn":
            assert not [entry for entry in entries if entry.endswith(".py")], "the meta-distribution holds no code"
            continue
        package = name.replace("-", "_")
        assert f"{package}/py.typed" in entries
        assert {entry.partition("/")[0].partition("-")[0] for entry in entries} == {package}, (
            "one package, nothing else"
        )


def test_every_plugin_names_its_entry_point(wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            points = [
                archive.read(entry).decode() for entry in archive.namelist() if entry.endswith("entry_points.txt")
            ]
        text = "".join(points)
        if name == "chatlearn-core":
            assert "chatlearn_core.plugins.builtin" in text
        elif name == "chatlearn-cli":
            assert "chatlearn = chatlearn_cli.main:main" in text
            assert "chatlearn_cli.plugin" in text
        elif name in LIBRARIES:
            assert not text, f"{name} is a library"
        elif name not in {"chatlearn", "chatlearn-observe"}:
            assert f"{name.replace('-', '_')}.plugin" in text, name


def test_the_core_alone_lists_its_own_plugins_and_then_what_is_added(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    for name in ("chatlearn-core", "chatlearn-trial"):
        unpack(wheels[name], site)
    # Third-party libraries come from here; what is installed editable stays out, since .pth files in a folder that a
    # .pth file names are not read, and our own metadata is hidden by name.
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().lstrip("_").startswith("chatlearn") and entry.suffix != ".pth":
            (borrowed / entry.name).symlink_to(entry)
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    assert listed(environment) == {"chatlearn-core"}
    unpack(wheels["chatlearn-algorithms"], site)
    assert listed(environment) == {"chatlearn-core", "chatlearn-algorithms"}
    unpack(wheels["chatlearn-cli"], site)
    assert listed(environment, COMMAND) == {"chatlearn-core", "chatlearn-cli", "chatlearn-algorithms"}


def test_every_file_of_a_package_is_inside(wheels: dict[str, Path]) -> None:
    """Data files too: a hosted engine runs files of ours by their path."""
    for project in PROJECTS:
        if project == ROOT:
            continue
        package = project.name
        source = project / "src"
        files = {
            str(file.relative_to(source))
            for file in (source / package).rglob("*")
            if file.is_file() and not CACHES & set(file.parts)
        }
        with zipfile.ZipFile(wheels[package.replace("_", "-")]) as archive:
            inside = {entry for entry in archive.namelist() if not entry.partition("/")[0].endswith(".dist-info")}
        assert inside == files, package


def test_nothing_is_imported_that_is_not_declared(wheels: dict[str, Path]) -> None:
    """Read from the source, so that imports inside functions count; extras and engines are declared, too."""
    problems: dict[str, dict[str, str]] = {}
    for name, wheel in wheels.items():
        requirements = [Requirement(text) for text in metadata_of(wheel).get_all("Requires-Dist") or []]
        declared = {requirement.name for requirement in requirements}
        imported: dict[str, str] = {}
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.namelist():
                if entry.endswith(".py") and "/template/" not in entry:
                    for module in top_level_imports(archive.read(entry).decode()):
                        imported.setdefault(module, entry)
        own = {name.replace("-", "_"), ENGINES.get(name), *SANDBOX_FILES.get(name, ()), *sys.stdlib_module_names}
        unknown = {
            module: entry
            for module, entry in imported.items()
            if module not in own and not declared & distributions_of(module)
        }
        if unknown:
            problems[name] = unknown
    assert not problems


@pytest.mark.parametrize("plugin", ["chatlearn-sglang", "chatlearn-vllm"])
def test_a_generator_of_an_engine_elsewhere_needs_only_its_plugin_here(
    wheels: dict[str, Path], plugin: str, tmp_path: Path
) -> None:
    """What pip would install for it, and nothing else: all modules of a run import, and it is listed."""
    environment = installed_alone(wheels, plugin, tmp_path)
    with zipfile.ZipFile(wheels[plugin]) as archive:
        modules = [
            entry.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for entry in archive.namelist()
            if entry.endswith(".py")
            and "/engine_side/" not in entry
            and not entry.endswith("/conformance.py")  # needs the extra "testing"
        ]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    imported = subprocess.run(
        [environment / "bin" / "python", "-I", "-c", code, *modules],
        cwd=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert imported.returncode == 0, imported.stderr
    assert listed(environment, strict=False) == {"chatlearn-core", "chatlearn-hf", plugin}


def installed_alone(wheels: dict[str, Path], name: str, folder: Path) -> Path:
    """An environment of one of our wheels and of what it requires: ours from wheels, others' files from here."""
    environment = folder / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    todo, done = [name], set()
    while todo:
        distribution = todo.pop()
        if distribution in done:
            continue
        done.add(distribution)
        if distribution in wheels:
            unpack(wheels[distribution], site)
            required = metadata_of(wheels[distribution]).get_all("Requires-Dist") or []
        else:
            installed = metadata.distribution(distribution)
            required = installed.requires or []
            for entry in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
                if not (site / entry).exists():
                    (site / entry).symlink_to(installed.locate_file(entry))
        for requirement in map(Requirement, required):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(canonicalize_name(requirement.name))
    return environment


def top_level_imports(source: str) -> set[str]:
    """First parts of the names of imported modules, imports for type checkers included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@cache
def distributions_of(module: str) -> set[str]:
    """Distributions that provide a module, by what is installed here; the module's own name, if none is."""
    found = PROVIDERS.get(module)
    names = {canonicalize_name(name) for name in found or [module]}
    return names | {COMPANIONS[name] for name in names & COMPANIONS.keys()}


def unpack(wheel: Path, site: Path) -> None:
    """What an installer does with a pure wheel, but for scripts."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def listed(environment: Path, program: Sequence[str] = REPORT, *, strict: bool = True) -> set[str]:
    """Distributions among the plugins of that environment; ``strict``: everything they need is there."""
    finished = subprocess.run(
        [environment / "bin" / "python", "-I", *program], cwd=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    entries = json.loads(finished.stdout)["plugins"]
    assert entries
    assert not strict or all(entry["status"] == "ok" for entry in entries), entries
    return {entry["distribution"] for entry in entries}
