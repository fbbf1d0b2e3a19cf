from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.records import RECORD_TYPES
from chatlearn_testing import scaffold
from chatlearn_testing.scaffold import TEMPLATE_KINDS, PackageNames, template_files, write_plugin

REPOSITORY = Path(__file__).parents[3]
OURS = ("chatlearn_core", "plugins/chatlearn_testing")


def install(root: Path, site: Path) -> None:
    """What ``pip install -e`` leaves behind, without pip."""
    project = tomllib.loads(root.joinpath("pyproject.toml").read_text())["project"]
    package = project["name"].replace("-", "_")
    info = site / f"{package}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        + "".join(f"Requires-Dist: {text}\n" for text in project["dependencies"])
    )
    ((name, module),) = project["entry-points"]["chatlearn"].items()
    info.joinpath("entry_points.txt").write_text(f"[chatlearn]\n{name} = {module}\n")
    info.joinpath("RECORD").write_text("")
    site.joinpath(package).symlink_to(root / "src" / package)


def run(*arguments: str, path: Path | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path) if path else "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(arguments, env=environment, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("acme-reward", "reward", ("acme-reward", "acme_reward", "acme", "Acme")),
        ("Acme_Rewards", "reward", ("acme-rewards", "acme_rewards", "acme", "Acme")),
        ("chatlearn-a.b-sync", "weight_sync", ("chatlearn-a-b-sync", "chatlearn_a_b_sync", "a_b", "AB")),
        ("reward", "reward", ("reward", "reward", "reward", "Reward")),
        ("chatlearn-reward", "reward", ("chatlearn-reward", "chatlearn_reward", "reward", "Reward")),
        ("gen2", "generator", ("gen2", "gen2", "gen2", "Gen2")),
    ],
)  # fmt: skip
def test_names_follow_from_the_distribution(name: str, kind: str, expected: tuple[str, ...]) -> None:
    names = PackageNames.of(name, kind)
    assert (names.distribution, names.package, names.plugin, names.class_prefix) == expected


@pytest.mark.parametrize("name", ["", "2fast", "a b", "-a", "a-", "a--b", "ä", "../a", "class", "auto"])
def test_names_that_cannot_be_used_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=f"'{name}'"):
        write_plugin(name, "reward", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "what"), [("Chatlearn.Core", "chatlearn-core .* is installed"), ("json", "'json'")])
def test_names_that_are_taken_are_refused(name: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=f"taken: .*{what}"):
        write_plugin(name, "reward", tmp_path)


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    tmp_path.joinpath("zed-reward").mkdir()
    with pytest.raises(PluginError, match="exists already; nothing was written"):
        write_plugin("zed-reward", "reward", tmp_path)
    assert list(tmp_path.joinpath("zed-reward").iterdir()) == []


def test_a_kind_without_template_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"Did you mean 'weight_sync'\?"):
        write_plugin("zed", "weightsync", tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    tmp_path.joinpath("file").write_text("")
    with pytest.raises(PluginError, match=r"cannot be written: .*--directory"):
        write_plugin("zed", "reward", tmp_path / "file")


def test_there_is_a_template_for_every_declared_kind_and_no_other() -> None:
    folders = {path.name for path in Path(scaffold.__file__).parent.joinpath("template").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == set(TEMPLATE_KINDS) <= {*RECORD_TYPES, "reader"}


@pytest.mark.parametrize("kind", TEMPLATE_KINDS)
def test_what_is_written_holds_no_other_name(kind: str, tmp_path: Path) -> None:
    _, written = write_plugin("my-acme-thing", kind, tmp_path)
    assert {"pyproject.toml", "README.md", "LICENSE", "py.typed"} <= {path.name for path in written}
    for path in written:
        text = path.read_text().replace("my-acme-thing", "").replace("my_acme_thing", "").replace("MyAcmeThing", "")
        assert "acme" not in text.lower(), path
        assert "__pycache__" not in path.parts


def test_the_folder_in_plugins_is_the_same() -> None:
    link = REPOSITORY / "plugins/template"
    assert link.resolve() == Path(scaffold.__file__).resolve().parent / "template"


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=["check", "format"])
def test_what_is_written_passes_its_own_linter(command: tuple[str, ...], tmp_path: Path) -> None:
    """Names change the order of imports and the length of lines."""
    for kind in TEMPLATE_KINDS:
        for word in ("a", "zed", "extraordinarily-long-company-name"):
            write_plugin(f"{word}-{kind.replace('_', '-')}", kind, tmp_path)
    finished = run(sys.executable, "-m", "ruff", *command, "--no-cache", ".", cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout


@pytest.mark.slow
def test_all_are_listed_and_their_own_tests_pass(tmp_path: Path) -> None:
    """The tests of trainer, generator, reward and weight sync hold the conformance suites."""
    out, site = tmp_path / "out", tmp_path / "site"
    words = dict.fromkeys(TEMPLATE_KINDS, "zed") | {"reader": "tsv"}  # a reader is a dataset, so it needs another name
    for kind, word in words.items():
        names, _ = write_plugin(f"{word}-{kind}", kind, out)
        install(out / names.distribution, site)
    listed = run(sys.executable, "-m", "chatlearn_cli.main", "plugins", "list", path=site).stdout
    rows = {tuple(line.split()[:5]) for line in listed.splitlines()}
    for kind, word in words.items():
        name = f"trainer.{word}" if kind == "flow_method" else word
        of = "dataset" if kind == "reader" else kind
        assert (of, name, f"{word}-{kind.replace('_', '-')}", "0.1.0", "ok") in rows, listed
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-c", os.devnull, "--import-mode=importlib")
    in_workers = out / "zed-runtime" / "tests" / "test_runtime.py::TestConformance"  # chatlearn-workers' tests have it
    tests = run(sys.executable, "-m", "pytest", *options, str(out), f"--deselect={in_workers}", path=site)
    assert tests.returncode == 0, tests.stdout + tests.stderr
    assert "WARN" not in tests.stdout.upper(), tests.stdout


@pytest.mark.slow
def test_pip_installs_it_from_wheels(tmp_path: Path) -> None:
    """``plugins new`` of installed wheels, and an editable install of what it wrote, in an environment of its own."""
    wheels, target, out = tmp_path / "wheels", tmp_path / "target", tmp_path / "out"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    built = run(*pip, "wheel", *offline, "--wheel-dir", str(wheels), *(str(REPOSITORY / path) for path in OURS))
    assert built.returncode == 0, built.stderr
    files = sorted(wheels.iterdir())
    packed = {name for wheel in files for name in zipfile.ZipFile(wheel).namelist() if "/template/" in name}
    for kind in TEMPLATE_KINDS:
        for relative, _ in template_files(kind):
            folder = "" if relative == "LICENSE" else f"{kind}/"
            assert f"chatlearn_testing/template/{folder}{relative}" in packed
    unpacked = run(*pip, "install", *offline, "--target", str(target), *map(str, files))
    assert unpacked.returncode == 0, unpacked.stderr
    chatlearn = (sys.executable, "-P", "-m", "chatlearn_cli.main", "plugins")
    made = run(*chatlearn, "new", "zed-reward", "--kind", "reward", "--directory", str(out), path=target)
    assert made.returncode == 0, made.stderr
    assert "__pycache__" not in {path.name for path in out.rglob("*")}
    installed = run(*pip, "install", *offline, "--target", str(tmp_path / "site"), str(out / "zed-reward"))
    assert installed.returncode == 0, installed.stderr
    checked = run(*chatlearn, "check", "zed-reward", path=tmp_path / "site")
    assert checked.returncode == 0, checked.stdout + checked.stderr
