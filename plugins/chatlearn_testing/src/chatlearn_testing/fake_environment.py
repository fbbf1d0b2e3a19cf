"""Fake distributions: real metadata and modules in a folder on ``sys.path``, as an installer would leave them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True, frozen=True)
class FakeEnvironment:
    """A folder used as site-packages."""

    site: Path

    def install(
        self,
        distribution: str,
        plugin: str | None = None,
        *,
        version: str = "1.0",
        requires: Sequence[str] = (),
        entry_points: str | None = None,
        modules: Mapping[str, str] | None = None,
    ) -> None:
        """Install a distribution whose entry point names a module with the source ``plugin`` (None: no plugin)."""
        module = distribution.replace("-", "_").lower()
        info = self.site / f"{module}-{version}.dist-info"
        info.mkdir(parents=True)
        required = "".join(f"Requires-Dist: {text}\n" for text in requires)
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{required}"
        )
        info.joinpath("RECORD").write_text("")
        sources = dict(modules or {})
        if plugin is not None:
            sources[f"{module}_plugin"] = plugin
            entry_points = entry_points or f"[chatlearn]\n{module} = {module}_plugin\n"
        if entry_points is not None:
            info.joinpath("entry_points.txt").write_text(entry_points)
        for name, source in sources.items():
            self.site.joinpath(f"{name}.py").write_text(textwrap.dedent(source))

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run this interpreter with the fake distributions installed."""
        variables = {**os.environ, "PYTHONPATH": str(self.site), **environment}
        return subprocess.run(
            [sys.executable, *arguments], env=variables, capture_output=True, text=True, timeout=120, check=False
        )

    def chatlearn(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the command line with the fake distributions installed."""
        return self.python("-m", "chatlearn_cli.main", *arguments, **environment)
