"""The sample filter ``acme``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.protocols import SampleFilter
from chatlearn_core.types import Sample

from acme_plugin.options import AcmeOptions

REASON = "too long for its run"


class AcmeFilter(SampleFilter):
    """Excludes completions longer than ``factor`` times the mean length of the run, this step included.

    Lengths are known without the tokens, which may stay with the workers that sampled them; a filter that looks at
    ``token_ids`` or texts names them in an attribute ``reads``.
    """

    def __init__(self, options: AcmeOptions) -> None:
        self.options = options
        self._tokens = 0
        self._samples = 0

    def excluded(self, samples: Sequence[Sample]) -> Mapping[str, str]:
        """Sample id -> reason."""
        self._tokens += sum(sample.num_completion_tokens for sample in samples)
        self._samples += len(samples)
        limit = self.options.factor * self._tokens / max(1, self._samples)
        return {sample.id: REASON for sample in samples if sample.num_completion_tokens > limit}

    def state_dict(self) -> dict[str, Any]:
        """What later verdicts depend on, as JSON values."""
        return {"tokens": self._tokens, "samples": self._samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Raises: CheckpointError: it is damaged."""
        try:
            tokens, samples = int(state["tokens"]), int(state["samples"])
        except (KeyError, TypeError, ValueError) as error:
            problem = f"is damaged: {type(error).__name__}: {error}"
            raise CheckpointError(f"The state of 'acme' {problem}.") from error
        self._tokens, self._samples = tokens, samples
