"""The library proven by a second runtime: that of the template."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from chatlearn_core.exceptions import TrainerLostError
from chatlearn_core.plugins.records import RuntimeSpec
from chatlearn_hosting.fork_server import ForkServer
from chatlearn_testing import scaffold
from chatlearn_testing.suites import RuntimeConformance
from chatlearn_testing.suites.runtime_fixtures import Stand
from chatlearn_workers.weight_ends import RemoteSenders

TEMPLATE = Path(scaffold.__file__).parent / "template" / "runtime" / "src"
PRELOADED = (
    "acme_plugin.worker",
    "chatlearn_testing.fakes.box_sync",
    "chatlearn_testing.fakes.generator",
    "chatlearn_testing.fakes.plugin",
    "chatlearn_testing.fakes.reward",
    "chatlearn_testing.fakes.trainer",
    "chatlearn_workers.workers",
    "torch.distributed",
)
"""What workers import, so that no worker has to."""
pytestmark = pytest.mark.slow


class SharedServer:
    """A fork server that outlives runtimes."""

    def __init__(self, server: ForkServer) -> None:
        self.start = server.start

    def close(self) -> None:
        """Leave it to the others."""


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """The template's package, where its workers find it, too."""
    sys.path.append(str(TEMPLATE))
    with ForkServer(*PRELOADED) as server:
        runtime = importlib.import_module("acme_plugin.runtime").AcmeRuntime
        with mock.patch.object(runtime, "fork_server", return_value=SharedServer(server)):
            yield
    sys.path.remove(str(TEMPLATE))
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_plugin"]:
        del sys.modules[name]


class TestProcessRuntime(RuntimeConformance):
    """The runtime of the template: plain processes, no framework."""

    backend = RuntimeSpec(
        name="acme",
        factory="acme_plugin.runtime:AcmeRuntime",
        options="acme_plugin.options:AcmeOptions",
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
