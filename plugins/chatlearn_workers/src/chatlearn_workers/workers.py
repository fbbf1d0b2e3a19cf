"""Selects the worker class for each kind of role."""

from __future__ import annotations

from collections.abc import Callable

from chatlearn_workers.environment_worker import EnvironmentWorker
from chatlearn_workers.generator_worker import GeneratorWorker
from chatlearn_workers.reward_worker import RewardWorker
from chatlearn_workers.trainer_worker import TrainerWorker
from chatlearn_workers.worker import NodeAddress, Worker
from chatlearn_workers.worker_spec import WorkerSpec

WORKERS: dict[str, Callable[[WorkerSpec, NodeAddress], Worker]] = {
    "trainer": TrainerWorker,
    "generator": GeneratorWorker,
    "reward": RewardWorker,
    "environment": EnvironmentWorker,
}


def build_worker(spec: WorkerSpec, node_address: NodeAddress) -> Worker:
    """The worker that a spec describes.

    Raises:
        PluginError: this interpreter lacks the driver's choice.
    """
    return WORKERS[spec.kind](spec, node_address)
