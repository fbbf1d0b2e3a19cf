"""Which launcher counts, and the Ray command of a node."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

from chatlearn_core.exceptions import ConfigError, PluginError, PluginNotFoundError
from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import LauncherSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.sources import PluginSource
from chatlearn_core.protocols import NodePart
from chatlearn_ray import cli
from chatlearn_ray.launch import find_part, ray_command

TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
PAI_DLC = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
SLURM = {"SLURM_NODEID": "2", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "gpu[007-009]", "SLURM_LOCALID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1"}


def open_mpi(environment: Mapping[str, str]) -> NodePart | None:
    rank = environment.get("OMPI_COMM_WORLD_RANK")
    return None if rank is None else NodePart(int(rank), 2, "mpi-head")


def broken(environment: Mapping[str, str]) -> Any:
    raise LookupError("no table of nodes")


def wrong(environment: Mapping[str, str]) -> Any:
    return 3


@pytest.fixture(scope="module")
def with_launchers() -> Iterator[Callable[..., PluginRegistry]]:
    """A function that returns what is installed, and launchers of these functions and orders."""
    code = types.ModuleType("acme_launchers")
    vars(code).update(open_mpi=open_mpi, broken=broken, wrong=wrong)
    sys.modules["acme_launchers"] = code

    def make(*launchers: tuple[str, int]) -> PluginRegistry:
        @hookimpl
        def chatlearn_launchers() -> list[LauncherSpec]:
            return [
                LauncherSpec(
                    name=name.replace("_", "-"),
                    function=f"acme_launchers:{name}",
                    recognised_by=("OMPI_COMM_WORLD_RANK",),
                    order=order,
                )
                for name, order in launchers
            ]

        plugin = types.ModuleType("acme_launchers_plugin")
        vars(plugin).update(chatlearn_launchers=chatlearn_launchers)
        return discover_plugins(extra=[PluginSource("acme", "acme-launchers", "1.0", lambda: plugin)])

    yield make
    del sys.modules["acme_launchers"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, ("torchrun", NodePart(1, 2, "10.0.0.1", local_rank=1))),
        (PAI_DLC, ("pai-dlc", NodePart(0, 4, "job-master-0"))),
        (SLURM, ("slurm", NodePart(2, 3, "gpu007"))),
        (SLURM | PAI_DLC | TORCHRUN, ("torchrun", NodePart(1, 2, "10.0.0.1", local_rank=1))),
        (SLURM | PAI_DLC, ("pai-dlc", NodePart(0, 4, "job-master-0"))),
    ],
)
def test_the_launcher_of_lowest_order_counts(environment: Any, expected: Any) -> None:
    assert find_part(discover_plugins(), environment) == expected


def test_a_plugin_adds_a_launcher_and_places_it(with_launchers: Callable[..., PluginRegistry]) -> None:
    assert find_part(with_launchers(("open_mpi", 400)), OPEN_MPI) == ("open-mpi", NodePart(1, 2, "mpi-head"))
    assert find_part(with_launchers(("open_mpi", 400)), OPEN_MPI | SLURM)[0] == "slurm"
    assert find_part(with_launchers(("open_mpi", 250)), OPEN_MPI | SLURM)[0] == "open-mpi"


def test_two_of_the_same_order_are_an_error_unless_one_is_named(with_launchers: Callable[..., PluginRegistry]) -> None:
    registry = with_launchers(("open_mpi", 300))
    with pytest.raises(ConfigError, match=r"two launchers of order 300 .* open-mpi \(OMPI_.*\) and slurm .*--launcher"):
        find_part(registry, OPEN_MPI | SLURM)
    assert find_part(registry, OPEN_MPI | SLURM, "slurm") == ("slurm", NodePart(2, 3, "gpu007"))
    assert find_part(registry, SLURM)[0] == "slurm"


def test_a_launcher_that_is_named_must_have_started_the_process() -> None:
    with pytest.raises(ConfigError, match=r"launcher slurm \(SLURM_NODEID\) did not start this process"):
        find_part(discover_plugins(), TORCHRUN, "slurm")
    with pytest.raises(PluginNotFoundError, match=r"No launcher named 'slrm' \(--launcher\)(.|\n)*mean 'slurm'"):
        find_part(discover_plugins(), TORCHRUN, "slrm")


def test_without_a_launcher_the_error_lists_the_known_ones() -> None:
    known = r"torchrun \(GROUP_RANK\), pai-dlc \(RANK, WORLD_SIZE, MASTER_ADDR\), slurm \(SLURM_NODEID\)"
    with pytest.raises(ConfigError, match=rf"no launcher was found: .*{known}"):
        find_part(discover_plugins(), {"PATH": "/bin"})


def test_a_malformed_variable_names_the_launcher() -> None:
    with pytest.raises(ConfigError, match="launcher 'slurm': the environment variable SLURM_NODEID is 'one'"):
        find_part(discover_plugins(), SLURM | {"SLURM_NODEID": "one"})


@pytest.mark.parametrize(("name", "words"), [("broken", "LookupError: no table of nodes"), ("wrong", "returned a int")])
def test_a_broken_launcher_is_named(name: str, words: str, with_launchers: Callable[..., PluginRegistry]) -> None:
    registry = with_launchers((name, 50))
    with pytest.raises(PluginError, match=rf"launcher '{name}' \(acme-launchers 1.0\) .*{words}"):
        find_part(registry, SLURM)
    assert find_part(registry, SLURM, "slurm")[0] == "slurm"


def test_the_command_of_head_and_worker() -> None:
    assert ray_command(NodePart(1, 2, "10.0.0.1")) == ["ray", "start", "--address=10.0.0.1:6379", "--block"]
    assert ray_command(NodePart(0, 4, "h"), 7000) == [
        "ray", "start", "--head", "--port=7000", "--include-dashboard=false", "--block"
    ]  # fmt: skip


def test_cluster_up_shows_the_command_of_the_named_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SLURM | TORCHRUN).items():
        monkeypatch.setenv(name, value)
    shown = [
        CliRunner().invoke(cli.app, ["up", "--show", *options]).output for options in ([], ["--launcher", "slurm"])
    ]
    assert shown[0].startswith("torchrun: node 1 of 2, worker of 10.0.0.1: ")
    assert shown[1].startswith("slurm: node 2 of 3, worker of gpu007: ")
    assert shown[1].strip().endswith("ray start --address=gpu007:6379 --block")
