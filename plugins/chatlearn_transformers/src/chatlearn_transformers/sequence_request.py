"""A pending request of the decode loop, with the state that the slot table does not hold."""

from __future__ import annotations

from dataclasses import dataclass

from chatlearn_core.types import Completion, FinishReason, Floats, TokenIds
from chatlearn_generator_kit.pending_request import PendingRequest
from chatlearn_transformers.stopping import StopStrings


@dataclass(slots=True, eq=False)
class SequenceRequest(PendingRequest):
    """A request that waits for a slot or has one."""

    watcher: StopStrings | None = None

    @property
    def max_length(self) -> int:
        """Longest possible number of prompt and completion tokens."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens

    def sampled(
        self, token_ids: TokenIds, logprobs: Floats, raw_logprobs: Floats, reason: FinishReason, text: str
    ) -> Completion:
        """Return the completion of a row; arrays are [C] and include resumed tokens."""
        without_raw = self.prior is not None and self.prior.raw_logprobs is None and self.num_prior > 0
        return self.completion(token_ids, logprobs, reason, text, None if without_raw else raw_logprobs)
