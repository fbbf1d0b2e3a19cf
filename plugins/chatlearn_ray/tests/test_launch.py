from __future__ import annotations

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_ray.launch import NodeRole, first_host, node_role


def test_torchrun_counts_nodes_in_group_rank() -> None:
    environment = {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    role = node_role(environment)
    assert role == NodeRole("torchrun", 1, 2, "10.0.0.1", local_rank=1)
    assert role.command() == ["ray", "start", "--address=10.0.0.1:6379", "--block"]


def test_pai_dlc_counts_nodes_in_rank() -> None:
    role = node_role({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"})
    assert role == NodeRole("PAI-DLC", 0, 4, "job-master-0")
    assert role.command(7000) == ["ray", "start", "--head", "--port=7000", "--include-dashboard=false", "--block"]


def test_slurm_takes_the_first_host_as_head() -> None:
    environment = {
        "SLURM_NODEID": "2",
        "SLURM_NNODES": "3",
        "SLURM_JOB_NODELIST": "gpu[007-009]",
        "SLURM_LOCALID": "0",
    }
    assert node_role(environment) == NodeRole("SLURM", 2, 3, "gpu007")


@pytest.mark.parametrize(
    ("node_list", "host"),
    [("a", "a"), ("a,b", "a"), ("gpu[3,5-7]", "gpu3"), ("n[01-02]-ib,m1", "n01-ib"), ("a-b-[10-11]", "a-b-10")],
)
def test_first_host(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


def test_without_a_launcher_the_error_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"neither torchrun .* nor PAI-DLC .* nor SLURM"):
        node_role({"PATH": "/bin"})


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="SLURM_NODEID is 'one'"):
        node_role({"SLURM_NODEID": "one"})


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
        node_role({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"})
