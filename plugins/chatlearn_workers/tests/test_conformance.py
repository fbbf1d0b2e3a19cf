"""The library proven by a second runtime: plain processes, no framework."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatlearn_core.plugins.records import RuntimeSpec
from chatlearn_testing.fork_server import ForkServer
from chatlearn_testing.suites import RuntimeConformance

MODULE = "chatlearn_process_runtime"
PRELOADED = (
    "torch.distributed",
    "chatlearn_testing.fakes.box_sync",
    "chatlearn_testing.fakes.generator",
    "chatlearn_testing.fakes.plugin",
    "chatlearn_testing.fakes.reward",
    "chatlearn_testing.fakes.trainer",
    "chatlearn_workers.workers",
)
"""What workers import, so that no worker has to."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def importable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The runtime's module, where its workers find it, too."""
    site = tmp_path_factory.mktemp("site")
    shutil.copy(Path(__file__).with_name("process_runtime.py"), site / f"{MODULE}.py")
    sys.path.append(str(site))
    with ForkServer(MODULE, *PRELOADED) as server:
        importlib.import_module(MODULE).SERVER = server
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
