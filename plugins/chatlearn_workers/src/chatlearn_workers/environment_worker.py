"""One worker of an environment role, in its own process."""

from __future__ import annotations

import torch

from chatlearn_core.protocols import RolloutOrder
from chatlearn_core.runtime.model_families import model_family
from chatlearn_core.types import Rollout
from chatlearn_runtime_kit.environments import LocalEnvironments
from chatlearn_runtime_kit.role_handles import environment_handles
from chatlearn_workers.conversation import AskingWorker, current_call
from chatlearn_workers.worker import NodeAddress, Worker, WorkerFacts
from chatlearn_workers.worker_spec import WorkerSpec


class EnvironmentWorker(AskingWorker, Worker):
    """Makes rollouts; the driver forwards its sampling requests to generator roles."""

    def __init__(self, spec: WorkerSpec, node_address: NodeAddress) -> None:
        Worker.__init__(self, spec, node_address)
        AskingWorker.__init__(self)
        self._group: LocalEnvironments | None = None

    async def setup(self) -> WorkerFacts:
        """Build the environment and set it up."""
        assert self.spec.plugin is not None, "an environment is a plugin"
        assert self.spec.environment is not None, "an environment's role is in its spec"
        assert self.context.model is not None, "an environment has the tokenizer of the run's model"
        if self.spec.num_threads is not None:
            torch.set_num_threads(self.spec.num_threads)
        source = self.context.model
        tokenizer = model_family(self.registry, source).load_tokenizer(source)
        role = self.spec.environment
        handles = environment_handles(role.name, role.uses, self.registry)
        self._group = LocalEnvironments(role, self.build(self.spec.plugin, handles=handles), tokenizer)
        await self._group.start()
        return self.facts()

    async def rollout(self, order: RolloutOrder) -> Rollout:
        """One rollout; a call of a conversation."""
        assert self._group is not None, "set up before it is used"
        return await self._group.rollout(order, current_call().ask)

    async def close(self) -> None:
        """Close the environment."""
        group, self._group = self._group, None
        await self.close_all([] if group is None else [group.close])
