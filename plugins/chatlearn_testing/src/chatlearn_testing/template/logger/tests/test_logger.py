from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from chatlearn_core.exceptions import ConfigError
from chatlearn_testing.suites import LoggerConformance

from acme_plugin.logger import AcmeLogger
from acme_plugin.options import AcmeOptions


class TestConformance(LoggerConformance):
    """The server would receive the metrics, not a file, so the suite cannot read them back."""

    backend = "acme"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(10)
        yield server


def test_every_finite_metric_becomes_a_gauge(server: socket.socket, tmp_path: Path) -> None:
    options = AcmeOptions(host="127.0.0.1", port=server.getsockname()[1], prefix="run1")
    logger = AcmeLogger(options, tmp_path)
    logger.start({})
    logger.log(7, {"reward": 0.25, "perf/tokens per s": 1234.5, "loss": math.nan, "last": 1e-9})
    logger.close()
    logger.close()
    packets = [server.recv(1024).decode() for _ in range(4)]
    assert packets == ["run1.step:7|g", "run1.reward:0.25|g", "run1.perf.tokens.per.s:1234.5|g", "run1.last:1e-09|g"]


def test_a_host_without_address_is_an_error_before_training(tmp_path: Path) -> None:
    options = AcmeOptions(host="no-such-host.invalid")
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid"):
        AcmeLogger(options, tmp_path).start({})
