"""The logger ``acme``."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatlearn_core.exceptions import ConfigError

from acme_plugin.options import AcmeOptions

UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
"""Characters that StatsD might read as separators."""


class AcmeLogger:
    """Sends every metric as a gauge, ``prefix.name:value|g``; the step is the gauge ``prefix.step``.

    Implements ``chatlearn_core.protocols.Logger``. UDP sends no replies, so a server that is down neither slows nor
    stops a run. A host that does not exist is an error before training begins.
    """

    def __init__(self, options: AcmeOptions, run_dir: Path) -> None:
        self.options = options
        self._socket: socket.socket | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Resolve the host.

        Raises:
            ConfigError: the host has no address.
        """
        host, port = self.options.host, self.options.port
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        except OSError as error:
            problem = f"cannot resolve host {host!r} (port {port}): {error}; correct its option host"
            raise ConfigError(f"log.loggers: logger 'acme' {problem}") from error
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)
        self._address = address

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one packet per metric, so a lost packet loses only one number."""
        assert self._socket is not None, "start was not called"
        for name, value in {"step": float(step), **metrics}.items():
            if math.isfinite(value):
                gauge = UNSAFE.sub(".", name)
                packet = f"{self.options.prefix}.{gauge}:{value:.9g}|g"
                self._socket.sendto(packet.encode(), self._address)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
