"""Every distribution builds a wheel that an index would take and that works where only it is installed."""

from __future__ import annotations

import email
import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PROJECTS = sorted(
    [ROOT]
    + [file.parent for file in ROOT.glob("chatlearn_*/pyproject.toml")]
    + [file.parent for file in ROOT.glob("plugins/chatlearn_*/pyproject.toml")]
)


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
    from packaging.requirements import Requirement

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
            assert "chatlearn = chatlearn_core.cli.main:main" in text
        elif name not in {"chatlearn", "chatlearn-observe"}:
            assert f"{name.replace('-', '_')}.plugin" in text, name


def test_core_alone_lists_its_own_plugins_and_then_one_more(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    unpack(wheels["chatlearn-core"], site)
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


def unpack(wheel: Path, site: Path) -> None:
    """What an installer does with a pure wheel, but for scripts."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def listed(environment: Path) -> set[str]:
    """Distributions in ``chatlearn plugins list`` of that environment."""
    finished = subprocess.run(
        [environment / "bin" / "python", "-I", "-m", "chatlearn_core.cli.main", "plugins", "list", "--json"],
        cwd=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    content = json.loads(finished.stdout)
    entries = content["plugins"] if isinstance(content, dict) else content
    assert entries
    assert all(entry["status"] == "ok" for entry in entries), entries
    return {entry["distribution"] for entry in entries}
