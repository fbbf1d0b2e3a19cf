"""Calls of one role on another: the caller's handle, and the execution of its calls beside the runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ContractError
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import RoleHandle, Runtime
from chatlearn_core.protocols.model_family import ModelFamily
from chatlearn_core.protocols.prompt_renderer import PromptRenderer
from chatlearn_core.runtime.boundary import check_completion
from chatlearn_core.runtime.model_families import model_family
from chatlearn_core.runtime.outputs import check_outputs
from chatlearn_core.runtime.plan import RolePlan, RunPlan, UsedRole
from chatlearn_core.types import (
    Completion,
    Floats,
    GenerateRequest,
    OutputRequest,
    Outputs,
    SamplingParams,
    TokenIds,
    TrainBatch,
)
from chatlearn_runtime_kit.own_time import CURRENT

MAX_OPEN = 256
"""Default maximum number of open calls per handle; further calls wait in the caller's process."""


@dataclass(slots=True, frozen=True)
class ComputeRequest:
    """A request to a trainer to compute outputs. Picklable."""

    batch: TrainBatch
    request: OutputRequest


RoleRequest = GenerateRequest | ComputeRequest
Ask = Callable[[str, RoleRequest], Awaitable[Any]]
"""``(role, request)`` -> the ``Completion`` of a generator, or the ``Outputs`` of a trainer."""


class Handle:
    """Implements ``RoleHandle``.

    Args:
        owner: the calling role.
        used: the called role.
        registry: contains the model families.
        ask: executes a call.
        max_open: maximum number of open calls.
    """

    def __init__(
        self, owner: str, used: UsedRole, registry: PluginRegistry, ask: Ask, max_open: int = MAX_OPEN
    ) -> None:
        self._owner = owner
        self._used = used
        self._registry = registry
        self._ask_role = ask
        self._open = asyncio.Semaphore(max_open)

    @property
    def role(self) -> str:
        return self._used.name

    @property
    def kind(self) -> str:
        return self._used.kind

    @property
    def model_path(self) -> str:
        return self._used.model.path

    @property
    def weights_change(self) -> bool:
        return self._used.weights_change

    @property
    def classifies(self) -> bool:
        return self._used.classifies

    @cached_property
    def _family(self) -> ModelFamily:
        return model_family(self._registry, self._used.model)

    @cached_property
    def tokenizer(self) -> Any:
        return self._family.load_tokenizer(self._used.model)

    @cached_property
    def renderer(self) -> PromptRenderer:
        return self._family.renderer(self.tokenizer, max_tokens=self.max_length)

    @cached_property
    def max_length(self) -> int:
        longest = self._family.facts(self._used.model).max_length
        return min(self._used.model.max_length or longest, longest)

    async def generate(
        self, token_ids: TokenIds, sampling: SamplingParams, *, request_id: str, group_id: str = ""
    ) -> Completion:
        """See ``RoleHandle``."""
        self._require("generator", "generate")
        request = GenerateRequest(self._id(request_id), np.asarray(token_ids), sampling, group_id)
        completion: Completion = await self._ask(request)
        return completion

    async def score(
        self,
        token_ids: TokenIds,
        continuation_ids: TokenIds,
        *,
        request_id: str,
        group_id: str = "",
        temperature: float = 1.0,
    ) -> Floats:
        """See ``RoleHandle``."""
        self._require("generator", "score")
        forced = np.asarray(continuation_ids)
        sampling = SamplingParams(max_tokens=len(forced), temperature=temperature)
        request = GenerateRequest(self._id(request_id), np.asarray(token_ids), sampling, group_id, forced_ids=forced)
        completion: Completion = await self._ask(request)
        return np.asarray(completion.logprobs)

    async def classify(self, token_ids: TokenIds, *, request_id: str, group_id: str = "") -> float:
        """See ``RoleHandle``."""
        self._require("generator", "classify")
        sampling = SamplingParams(max_tokens=1)
        request = GenerateRequest(self._id(request_id), np.asarray(token_ids), sampling, group_id, classify=True)
        completion: Completion = await self._ask(request)
        if completion.score is None:
            raise BackendError(f"role {self.role!r} was interrupted before it classified request {request.id!r}")
        return completion.score

    async def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """See ``RoleHandle``."""
        self._require("trainer", "compute")
        outputs: Outputs = await self._ask(ComputeRequest(batch, request))
        return outputs

    def _id(self, request_id: str) -> str:
        """A request id that includes the calling role, so that requests of two roles are not confused."""
        return f"{self._owner}/{request_id}"

    def _require(self, kind: str, method: str) -> None:
        if self.kind != kind:
            raise ContractError(
                f"role {self._owner!r} calls {method} of role {self.role!r}, which is a {self.kind}; only a {kind} has "
                "it"
            )

    async def _ask(self, request: RoleRequest) -> Any:
        """Await the answer; meanwhile the calling reward's timeout is paused."""

        async def answer() -> Any:
            async with self._open:
                return await self._ask_role(self.role, request)

        clock = CURRENT.get()
        return await (answer() if clock is None else clock.without(answer()))


def build_handles(
    owner: str, used: Mapping[str, UsedRole], registry: PluginRegistry, ask: Ask
) -> dict[str, RoleHandle]:
    """The handles of one backend of a role."""
    return {handle: Handle(owner, role, registry, ask) for handle, role in used.items()}


def environment_handles(owner: str, used: Mapping[str, UsedRole], registry: PluginRegistry) -> dict[str, RoleHandle]:
    """The handles of an environment: its generators' models and tokenizers. It samples with its ``RolloutContext``."""

    async def refuse(role: str, request: RoleRequest) -> Any:
        raise ContractError(
            f"environment role {owner!r} asks role {role!r} through its handle; only RolloutContext.generate samples "
            "for a rollout, with its seed and its limits"
        )

    return build_handles(owner, used, registry, refuse)


class RoleCalls:
    """Executes, beside the runtime, one role's calls on other roles.

    Args:
        owner: the calling role.
        plan: the run's plan.
        runtime: hosts the called roles.
    """

    def __init__(self, owner: RolePlan, plan: RunPlan, runtime: Runtime) -> None:
        self.owner = owner
        self.plan = plan
        self.runtime = runtime

    async def ask(self, role: str, request: RoleRequest) -> Completion | Outputs:
        """The checked answer of a role, with plain arrays.

        Raises:
            ContractError: the owner does not use this role, or the answer breaks its contract.
            BackendTimeoutError: no answer in time; names both roles.
            RoleLostError: the role can no longer work.
            BackendError: the request failed.
        """
        if role not in self.owner.used_roles:
            raise ContractError(
                f"{self.owner.kind} role {self.owner.name!r} calls role {role!r}, which is none that it uses; it uses "
                f"{', '.join(sorted(self.owner.used_roles)) or 'none'} (roles.{self.owner.name}.uses)"
            )
        try:
            if isinstance(request, ComputeRequest):
                return await self._compute(role, request)
            return await self._generate(role, request)
        except BackendTimeoutError as error:
            kind = self.plan.roles[role].kind
            raise BackendTimeoutError(
                f"{self.owner.kind} role {self.owner.name!r} waited for {kind} role {role!r}: {error}"
            ).at(error.place, error.stack) from error

    async def _generate(self, role: str, request: GenerateRequest) -> Completion:
        sampled = await self.runtime.ask_generator(role, request)
        [completion] = await self.runtime.data.aget_completions([sampled])
        check_completion(completion, request, self.plan.roles[role].origin)
        return completion

    async def _compute(self, role: str, asked: ComputeRequest) -> Outputs:
        specs = self.plan.registry.outputs
        for name in sorted(asked.request.names):
            if name not in specs or specs[name].per != "sequence":
                raise ContractError(
                    f"{self.owner.kind} role {self.owner.name!r} asks trainer role {role!r} for the output {name!r}; "
                    "only outputs of one number a sequence travel between roles: "
                    f"{', '.join(sorted(spec.name for spec in specs.values() if spec.per == 'sequence'))}"
                )
        outputs = await self.runtime.trainer(role).compute(asked.batch, asked.request)
        check_outputs(outputs, asked.batch, asked.request, self.plan.roles[role].origin, specs)
        return outputs
