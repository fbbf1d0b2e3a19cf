from __future__ import annotations

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import NodePart
from chatlearn_ray.launchers import first_host, pai_dlc, slurm, torchrun


@pytest.mark.parametrize(
    ("node_list", "host"),
    [("a", "a"), ("a,b", "a"), ("gpu[3,5-7]", "gpu3"), ("n[01-02]-ib,m1", "n01-ib"), ("a-b-[10-11]", "a-b-10")],
)
def test_first_host(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


def test_a_list_without_a_host_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"SLURM_JOB_NODELIST is '\[1-2\]'"):
        first_host("[1-2]")


def test_torchrun_counts_nodes_in_group_rank_and_pai_dlc_in_rank() -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    assert torchrun(environment) == NodePart(1, 2, "h")
    assert pai_dlc(environment) == NodePart(3, 4, "h")
    assert slurm(environment) is None


@pytest.mark.parametrize("number", ["²", "٣", "+1", "1_0", " 1", "-1", "1.0"])
def test_what_python_reads_as_a_number_and_no_launcher_writes_is_refused(number: str) -> None:
    with pytest.raises(ConfigError, match="RANK is "):
        pai_dlc({"RANK": number, "WORLD_SIZE": "11", "MASTER_ADDR": "h"})


def test_a_rank_beyond_the_number_of_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="RANK is 4, and WORLD_SIZE is 4; ranks are smaller"):
        pai_dlc({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "h"})
