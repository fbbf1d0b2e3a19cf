"""One rollout on its way from generation to training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from chatlearn_core.types.completion import Completion, Floats
from chatlearn_core.types.pickling import pickled_by_position
from chatlearn_core.types.prompt import Prompt, TokenIds
from chatlearn_core.types.stored import joined

UNGRADED = "ungraded"
"""Component, 1.0, of a reward whose value says only that judging the sample took too much time or memory. Counted."""


@pickled_by_position
@dataclass(slots=True, frozen=True)
class RewardResult:
    """The verdict on one sample, or why there is none. Exactly one of ``value`` and ``error`` is set."""

    value: float | None
    components: dict[str, float] = field(default_factory=dict)
    """Named parts, before weighting."""
    token_values: Floats | None = None
    """[C] optional reward of each completion token, added to ``value`` at the last one."""
    error: str | None = None
    """What went wrong: an exception, a timeout, a NaN, a wrong count."""

    def __post_init__(self) -> None:
        assert (self.value is None) != (self.error is None), "a reward has either a value or an error"


@dataclass(slots=True, eq=False)
class Sample:
    """One sequence: the tokens of prompt and completion, what was sampled, and all that was computed for them.

    Every per-token array is aligned with ``token_ids``: entry t belongs to token t (a logprob at t is that of token t
    given the tokens before it). Where ``loss_mask`` is False the entry is 0 and has no meaning.
    """

    id: str
    """Unique in a run: ``{prompt.id}@{step}#{index in the group}``."""
    group_id: str
    """Unique in a run: ``{prompt.id}@{step}``."""
    prompt: Prompt
    token_ids: TokenIds
    """[T] prompt, then completion."""
    loss_mask: npt.NDArray[np.bool_]
    """[T] True where the policy sampled (or should imitate) the token."""
    completion: Completion | None = None
    reward: RewardResult | None = None
    token_data: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """name -> [T, ...], for example ``generator_logprobs``, ``reference_logprobs``, ``advantages``."""
    sequence_data: dict[str, float] = field(default_factory=dict)
    """name -> one number for the sequence."""
    exclusion: str | None = None
    """Why this sample is not trained on; None while it is admitted. Counted by reason."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt.token_ids)


def sample_from_completion(sample_id: str, group_id: str, prompt: Prompt, completion: Completion) -> Sample:
    """Join a prompt and its completion into one sequence with loss mask and ``generator_logprobs``.

    Logprobs of another distribution than the one that was sampled from, which the completion's basis states, are
    called ``generator_raw_logprobs``, so that no ratio can be made of them by mistake. Arrays of a completion that are
    kept elsewhere stay there.
    """
    num_prompt = len(prompt.token_ids)
    token_ids = joined([prompt.token_ids, completion.token_ids], np.int64)
    loss_mask = np.zeros(len(token_ids), dtype=np.bool_)
    loss_mask[num_prompt:] = True
    sample = Sample(sample_id, group_id, prompt, token_ids, loss_mask, completion)
    sample.token_data[generator_logprobs_name(completion)] = _aligned(completion.logprobs, num_prompt)
    for name, values in completion.token_data.items():
        sample.token_data[name] = _aligned(values, num_prompt)
    return sample


def generator_logprobs_name(completion: Completion) -> str:
    """What a completion's logprobs are called in ``Sample.token_data``."""
    return "generator_logprobs" if completion.basis == completion.sampling.basis else "generator_raw_logprobs"


def _aligned(values: npt.NDArray[Any], num_prompt: int) -> npt.NDArray[Any]:
    """Put [C, ...] completion values behind ``num_prompt`` zeros."""
    padding = np.zeros((num_prompt, *values.shape[1:]), dtype=values.dtype)
    return joined([padding, values])
