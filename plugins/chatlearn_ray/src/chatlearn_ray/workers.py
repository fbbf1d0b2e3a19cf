"""Which class a worker of each kind is."""

from __future__ import annotations

from collections.abc import Callable

from chatlearn_ray.generator_worker import GeneratorWorker
from chatlearn_ray.reward_worker import RewardWorker
from chatlearn_ray.trainer_worker import TrainerWorker
from chatlearn_ray.worker import Worker
from chatlearn_ray.worker_spec import WorkerSpec

WORKERS: dict[str, Callable[[WorkerSpec], Worker]] = {
    "trainer": TrainerWorker,
    "generator": GeneratorWorker,
    "reward": RewardWorker,
}


def build_worker(spec: WorkerSpec) -> Worker:
    """The worker that a spec describes.

    Raises:
        PluginError: this interpreter does not hold what the driver chose.
    """
    return WORKERS[spec.kind](spec)
