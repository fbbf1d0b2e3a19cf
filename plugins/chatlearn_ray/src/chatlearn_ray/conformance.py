"""Settings of ``chatlearn plugins check chatlearn-ray``; runs never import this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatlearn_testing.suites import LauncherCase

_NODES = ("gpu007", "gpu008", "gpu009")
_LISTED = {"SLURM_JOB_NODELIST": "gpu[007-009]", "SLURM_NNODES": "3", "SLURM_JOB_ID": "4711"}
_TORCHRUN = LauncherCase(
    nodes=[
        [
            {
                "GROUP_RANK": str(node),
                "GROUP_WORLD_SIZE": "2",
                "LOCAL_RANK": str(process),
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "10.0.0.1",
                "MASTER_PORT": "29500",
                "RANK": str(2 * node + process),
                "WORLD_SIZE": "4",
            }
            for process in range(2)
        ]
        for node in range(2)
    ],
    head="10.0.0.1",
    optional=frozenset({"LOCAL_RANK"}),
)
_PAI_DLC = LauncherCase(
    nodes=[
        [{"MASTER_ADDR": "dlc-job-master-0", "MASTER_PORT": "23456", "RANK": str(node), "WORLD_SIZE": "4"}]
        for node in range(4)
    ],
    head="dlc-job-master-0",
)
_SLURM = LauncherCase(
    nodes=[
        [
            {**_LISTED, "SLURM_NODEID": str(node), "SLURM_LOCALID": str(process), "SLURMD_NODENAME": name}
            for process in range(2)
        ]
        for node, name in enumerate(_NODES)
    ],
    head=_NODES[0],
    optional=frozenset({"SLURM_LOCALID"}),
)


def _some(case: LauncherCase) -> Mapping[str, str]:
    return case.nodes[1][0]


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "launcher/torchrun": {"cases": (_TORCHRUN,), "foreign": (_some(_PAI_DLC), _some(_SLURM))},
    # Processes of torchrun have all variables of PAI-DLC: torchrun's order is lower.
    "launcher/pai-dlc": {"cases": (_PAI_DLC,), "foreign": (_some(_SLURM),)},
    "launcher/slurm": {"cases": (_SLURM,), "foreign": (_some(_TORCHRUN), _some(_PAI_DLC))},
}
"""``kind/name`` -> attributes of the suite."""
