"""One Ray for all tests of this folder, and a distribution with light backends that its workers find."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import ModelSource
from chatlearn_core.runtime.plan import BackendPlan, RolePlan, RunPlan

MODULE = "chatlearn_ray_test_backends"


def write_distribution(folder: Path, version: str, module: str = MODULE, source: str = "fake_backends.py") -> None:
    """A distribution that can be imported from ``folder``."""
    shutil.copy(Path(__file__).parent / source, folder / f"{module}.py")
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[chatlearn]\nfakes = {module}\n")


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginRegistry]:
    """The plugins of this process, the light backends among them."""
    folder = tmp_path_factory.mktemp("distribution")
    write_distribution(folder, "1.0")
    sys.path.append(str(folder))
    yield discover_plugins()
    sys.path.remove(str(folder))
    sys.modules.pop(MODULE, None)


FAST_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
    "health_check_timeout_ms": 2000,
}
"""A killed node is noticed after two seconds, one that is stopped after six."""
BLOCKS_ARE_STORED_FROM = 500
"""Bytes; by default blocks as small as those of these tests travel in messages, and no node can take them with it."""
SMALL_NODE: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 10**8}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A Ray cluster of one node, to which tests add others. More names of CPUs than cores: workers mostly wait."""
    from ray.cluster_utils import Cluster

    config = {
        **FAST_HEALTH_CHECKS,
        "max_direct_call_object_size": BLOCKS_ARE_STORED_FROM,
        "prestart_worker_first_driver": False,  # or each node would start as many processes as it has CPUs
    }
    head = {"num_cpus": 32, "_system_config": config, **SMALL_NODE}
    machines = Cluster(initialize_head=True, head_node_args=head)
    yield machines
    machines.shutdown()


@pytest.fixture(scope="session")
def ray_session(cluster: Any) -> Iterator[None]:
    """This process is a driver of the cluster."""
    import ray

    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


class Roles:
    """Writes plans."""

    def __init__(self, registry: PluginRegistry, run_dir: Path) -> None:
        self.registry = registry
        self.run_dir = run_dir

    def role(
        self,
        name: str,
        kind: str,
        backend: str,
        *,
        replicas: int = 1,
        ranks: int = 1,
        timeout_s: float = 60.0,
        **options: object,
    ) -> RolePlan:
        record = self.registry.select(kind, backend)
        made: BaseModel = self.registry.load_options(record)(**options)
        return RolePlan(
            name=name,
            kind=kind,
            backends=(BackendPlan(f"roles.{name}", record, made),),
            model=ModelSource("nowhere", "nowhere"),
            head="lm",
            device="cpu",
            replicas=replicas,
            ranks=ranks,
            trainable=True,
            engine={},
            timeout_s=timeout_s,
        )

    def plan(self, *roles: RolePlan) -> RunPlan:
        return RunPlan(
            registry=self.registry,
            roles={role.name: role for role in roles},
            weight_syncs=(),
            run_dir=self.run_dir,
            seed=0,
        )


@pytest.fixture
def roles(fakes: PluginRegistry, tmp_path: Path) -> Roles:
    return Roles(fakes, tmp_path)
