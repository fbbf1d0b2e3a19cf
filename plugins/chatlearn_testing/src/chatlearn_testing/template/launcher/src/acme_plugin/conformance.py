"""Input of the conformance suite; ``chatlearn plugins check`` and the tests read it, a run never does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatlearn_testing.suites import LauncherCase

HEAD = "train-0.train"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "launcher/acme": {
        "cases": (
            LauncherCase(
                nodes=[
                    [
                        {
                            "HOSTNAME": f"train-{index}",
                            "JOB_COMPLETION_INDEX": str(index),
                            "JOB_COMPLETIONS": "3",
                            "JOB_HEAD": HEAD,
                            "KUBERNETES_SERVICE_PORT": "443",
                        }
                    ]
                    for index in range(3)
                ],
                head=HEAD,
            ),
        ),
        "foreign": (
            {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1"},
            {"SLURM_NODEID": "1", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "gpu[1-3]"},
            {"HOSTNAME": "web-1", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"},
        ),
    }
}
