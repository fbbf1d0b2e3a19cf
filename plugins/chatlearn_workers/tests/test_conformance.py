"""The library proven by a second runtime: plain processes, no framework."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatlearn_core.plugins.records import RuntimeSpec
from chatlearn_testing.suites import RuntimeConformance

MODULE = "chatlearn_process_runtime"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def importable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The runtime's module, where its workers find it, too."""
    site = tmp_path_factory.mktemp("site")
    shutil.copy(Path(__file__).with_name("process_runtime.py"), site / f"{MODULE}.py")
    sys.path.append(str(site))
    yield
    sys.path.remove(str(site))
    sys.modules.pop(MODULE, None)


class TestProcessRuntime(RuntimeConformance):
    backend = RuntimeSpec(
        name="processes",
        factory=f"{MODULE}:make_runtime",
        options="chatlearn_workers.options:WorkersOptions",
        placement="host",
        refreshes=True,
    )
