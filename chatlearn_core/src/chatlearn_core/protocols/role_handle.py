"""How a reward calls another role, such as its judge or its reward model."""

from __future__ import annotations

from typing import Any, Protocol

from chatlearn_core.protocols.prompt_renderer import PromptRenderer
from chatlearn_core.types import Completion, Floats, OutputRequest, Outputs, SamplingParams, TokenIds, TrainBatch


class RoleHandle(Protocol):
    """One role under the handle that ``uses`` gives it; ``RoleContext.handles`` has it.

    Its methods are called from ``Reward.score``, on the event loop that runs it. While they wait, the time limit of the
    reward stands still: the role that is called has limits of its own. Wherever a runtime hosts the two roles, no call
    blocks the process of the reward.

    Example:
        judge = context.handles["judge"]
        prompt = judge.renderer.prompt([{"role": "user", "content": question}])
        completion = await judge.generate(prompt.token_ids, SamplingParams(max_tokens=64), request_id=sample.id)
    """

    @property
    def role(self) -> str:
        """Name of the role.

        Called: by a reward or environment, whenever it likes; in its worker; any number of times.
        """

    @property
    def kind(self) -> str:
        """``generator`` or ``trainer``.

        Called: by a reward or environment, whenever it likes; in its worker; any number of times.
        """

    @property
    def model_path(self) -> str:
        """Directory or hub id of its model.

        Called: by a reward or environment, whenever it likes; in its worker; any number of times.
        """

    @property
    def weights_change(self) -> bool:
        """Whether its weights change in the course of the run, so that the same request may be answered otherwise.

        Called: by a reward or environment, whenever it likes; in its worker; any number of times.
        """

    @property
    def tokenizer(self) -> Any:
        """Of its model; loaded when it is read first.

        Called: by a reward or environment, whenever it likes; in its worker; any number of times.

        Raises:
            ModelError: no tokenizer there.
        """

    @property
    def renderer(self) -> PromptRenderer:
        """Renders conversations with its model's chat template, without a system prompt of its own.

        Called: by a reward or environment, whenever it likes; in its worker; any number of times.
        """

    @property
    def max_length(self) -> int:
        """Longest sequence that its model takes, tokens.

        Called: by a reward or environment, whenever it likes; in its worker; any number of times.
        """

    @property
    def classifies(self) -> bool:
        """Whether it is a generator that serves a sequence classifier (``classify``), and samples and scores nothing.

        Called: by a reward or environment, whenever it likes; in its worker; any number of times.
        """

    async def generate(
        self, token_ids: TokenIds, sampling: SamplingParams, *, request_id: str, group_id: str = ""
    ) -> Completion:
        """Sample after these tokens; of a generator.

        Called: by a reward or environment, whenever it likes; in its worker; any number of times.

        Args:
            token_ids: [P] ids of its own tokenizer.
            sampling: its seed keys the random numbers.
            request_id: for messages; two requests that are open at a time have two.
            group_id: requests of one group go to one replica.

        Raises:
            ContractError: the role is no generator, or its completion breaks the contract.
            BackendTimeoutError: the role did not answer in time; names who waited for whom.
            RoleLostError: the role cannot work any more; whatever the caller makes of it, the run ends.
            BackendError: the request failed.
        """

    async def score(
        self,
        token_ids: TokenIds,
        continuation_ids: TokenIds,
        *,
        request_id: str,
        group_id: str = "",
        temperature: float = 1.0,
    ) -> Floats:
        """[C] logprobs of ``continuation_ids`` [C] after ``token_ids`` [P]; of a generator that scores
        (``RoleUse.scores``). Raises as ``generate`` does.

        Called: by a reward or environment, whenever it likes; in its worker; any number of times.
        """

    async def classify(self, token_ids: TokenIds, *, request_id: str, group_id: str = "") -> float:
        """The output of a sequence classifier for ``token_ids`` [P], without an activation; of a generator that
        classifies (``RoleUse.classifies``). Raises as ``generate`` does.

        Called: by a reward or environment, whenever it likes; in its worker; any number of times.
        """

    async def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """Outputs without gradient, one number a sequence; of a trainer. Raises as ``generate`` does.

        Called: by a reward or environment, whenever it likes; in its worker; any number of times.
        """
