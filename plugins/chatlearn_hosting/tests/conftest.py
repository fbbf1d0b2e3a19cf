from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chatlearn_hosting import HostedProcess

PACKAGE = "hosted_example"
NEIGHBOUR = "NAME = __name__\n\n\ndef double(value):\n    return 2 * value\n"
SPAWNED = "import os\n\n\ndef in_spawned_process():\n    os.environ['HOSTED_SPAWNED'] = '1'\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``hosted_example`` that is importable here."""
    directory = tmp_path / "packages" / PACKAGE
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text(SPAWNED)
    (directory / "neighbour.py").write_text(NEIGHBOUR)
    shutil.copy(Path(__file__).with_name("hosted_target.py"), directory / "target.py")
    monkeypatch.syspath_prepend(directory.parent)
    return directory


@pytest.fixture
def make(package: Path) -> Iterator[Callable[..., HostedProcess]]:
    """``make(factory="Target", python=..., environment=..., **arguments)``: not started."""
    made: list[HostedProcess] = []

    def build(
        factory: str = "Target",
        *,
        python: str | None = None,
        environment: Any = None,
        silence_s: float | None = None,
        **arguments: Any,
    ) -> HostedProcess:
        made.append(
            HostedProcess(
                "the engine",
                package=PACKAGE,
                factory=f"{PACKAGE}.target:{factory}",
                arguments=arguments,
                python=python,
                environment=environment,
                silence_s=silence_s,
            )
        )
        return made[-1]

    yield build
    for process in made:
        process.close(grace_s=0)


@pytest.fixture
def hosted(make: Callable[..., HostedProcess]) -> HostedProcess:
    """A started process that serves a ``Target``."""
    process = make()
    process.start(timeout_s=60)
    return process
