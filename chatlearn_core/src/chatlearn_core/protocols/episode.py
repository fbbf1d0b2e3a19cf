"""Episodes: environments that observe and act around a generator over several turns.

Tokens in, tokens out: an environment appends token ids, and the loss mask is True only on what the policy sampled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from chatlearn_core.types import Completion, GenerateRequest, Prompt, Sample

Generate = Callable[[GenerateRequest], Awaitable[Completion]]


class Episode(Protocol):
    """Plays one rollout. Built as ``factory(options, context)``; one object plays many rollouts at the same time."""

    async def play(self, sample_id: str, group_id: str, prompt: Prompt, generate: Generate) -> list[Sample]:
        """From the prompt to the end; returns one or more sequences of this rollout."""
