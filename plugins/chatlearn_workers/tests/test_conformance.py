"""The library proven by a second runtime: plain processes, no framework."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatlearn_core.exceptions import TrainerLostError
from chatlearn_core.plugins.records import RuntimeSpec
from chatlearn_testing.fork_server import ForkServer
from chatlearn_testing.suites import RuntimeConformance
from chatlearn_testing.suites.runtime_fixtures import Stand
from chatlearn_workers.weight_ends import RemoteSenders

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

    @pytest.mark.parametrize("limit", [1, 0])
    def test_a_rank_that_dies_before_its_transport_is_open_is_rebuilt(
        self, stand: Stand, monkeypatch: pytest.MonkeyPatch, limit: int
    ) -> None:
        """Between the start of the ranks and the first step: one restart is spent, and weights reach the generator."""
        killed: list[int] = []
        open_senders = RemoteSenders.open

        async def open_after_a_death(senders: RemoteSenders) -> None:
            if not killed:
                killed.append(runtime.trainer("trainer").workers[1].facts.pid)
                os.kill(killed[0], signal.SIGKILL)
            await open_senders(senders)

        monkeypatch.setattr(RemoteSenders, "open", open_after_a_death)
        roles = stand.role("trainer", "trainer", ranks=2), stand.role("generator", "generator")
        runtime = stand.build(stand.plan(*roles), max_trainer_restarts=limit)

        async def test() -> None:
            await runtime.start()
            assert [event.name for event in stand.events] == ["trainer_rebuilt"]
            assert killed[0] not in {worker.facts.pid for worker in runtime.trainer("trainer").workers}
            [receipt] = await runtime.sync_weights("trainer", "generator", 1)
            assert (receipt.state, receipt.policy_version) == ("serving", 1)

        async def refused() -> None:
            with pytest.raises(TrainerLostError, match=r"a rank died, and 0 restart\(s\), the limit .*rank 1 of 2"):
                await runtime.start()

        self.run(stand, test if limit else refused)
