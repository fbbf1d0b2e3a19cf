"""An algorithm: a flow over roles, an advantage, and a loss for each role that learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from chatlearn_core.protocols.loss import Loss
from chatlearn_core.types import LogprobBasis, Metrics, Sample

InputKind = Literal["prompts", "demonstrations"]


@dataclass(slots=True, frozen=True)
class AlgorithmContext:
    """What an algorithm may know about the run it is part of."""

    basis: LogprobBasis
    """Basis of the distribution that training rollouts are sampled from."""
    max_completion_tokens: int
    roles: Mapping[str, str]
    """Configured role name -> kind."""
    generator_basis: LogprobBasis | None = None
    """Basis of the logprobs that the generator returns for them, where it is another: they are then in ``token_data``
    as ``generator_raw_logprobs``, and there are no ``generator_logprobs``."""
    generator: str = "the generator"
    """Whose logprobs these are, for messages: plugin and role."""


class Algorithm(Protocol):
    """Built as ``factory(options, context)`` with an ``AlgorithmContext``. Pure: holds settings, no state."""

    @property
    def input(self) -> InputKind:
        """What it takes from the dataset."""

    @property
    def group_size(self) -> int:
        """Completions sampled for one prompt."""

    @property
    def policy(self) -> str:
        """The role that is the policy: its weights go to the generators, are exported at the end and are compared with
        what was sampled, and its metrics are named ``actor/...``. An algorithm with a loss for a single language model
        need not have this attribute: that one is the policy.
        """

    def flow(self, prompts: Any, m: Any) -> Any:
        """The data flow: an ordinary function over roles, traced once. Its shape may depend on the options."""

    def prepare_samples(self, samples: Sequence[Sample]) -> Metrics:
        """Turn the scored samples of one step into training samples, in place: add ``advantages`` (and the like) to
        ``token_data``; what must not be trained on gets an ``exclusion``. Samples arrive group by group, in the order
        of the prompts; those already excluded are among them and stay so.
        """

    def losses(self) -> Mapping[str, Loss]:
        """The loss of each trainer role that learns, by role name."""
