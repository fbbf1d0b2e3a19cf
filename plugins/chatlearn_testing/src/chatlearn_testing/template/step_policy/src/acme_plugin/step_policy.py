"""The step policy ``acme``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.protocols import Decision

from acme_plugin.options import AcmeOptions

USED = "acme/used_tokens"


class AcmeStepPolicy:
    """Counts trained tokens, also over a resume. Implements ``chatlearn_core.protocols.StepPolicy``."""

    def __init__(self, options: AcmeOptions) -> None:
        self.options = options
        self._used = 0.0

    def after_step(self, step: int, metrics: Mapping[str, float]) -> Decision | None:
        """Add the step's tokens; end the run once the budget is used. A step without the metric counts nothing."""
        tokens = metrics.get(self.options.metric)
        if tokens is None or not math.isfinite(tokens):
            return None
        self._used += tokens
        spent = self._used >= self.options.tokens
        return Decision(
            stop=f"{self._used:g} of {self.options.tokens} tokens are used" if spent else None,
            metrics={USED: self._used},
        )

    def state_dict(self) -> dict[str, Any]:
        """What later decisions depend on, as JSON values."""
        return {"used": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Raises: CheckpointError: it is damaged."""
        try:
            used = float(state["used"])
        except (KeyError, TypeError, ValueError) as error:
            problem = f"is damaged: {type(error).__name__}: {error}"
            raise CheckpointError(f"The state of 'acme' {problem}.") from error
        self._used = used
