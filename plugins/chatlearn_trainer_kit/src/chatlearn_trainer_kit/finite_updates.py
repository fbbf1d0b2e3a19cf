"""Refuses an optimizer step with a non-finite loss or gradient norm: keeps the weights and names the samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from chatlearn_core.exceptions import BackendError

NAMED_SAMPLES = 16
"""Largest number of sample ids in an error."""


def all_finite(values: Sequence[float], agree: Callable[[bool], bool] | None = None) -> bool:
    """Whether the numbers are finite, on every rank.

    Args:
        values: this rank's numbers.
        agree: reduces this rank's finding to whether it is true on all ranks; None if there is one rank.
    """
    finite = all(math.isfinite(value) for value in values)
    return finite if agree is None else agree(finite)


def refused_update(
    trainer: str,
    update: int,
    losses: Sequence[float],
    grad_norm: float,
    sample_ids: Sequence[Sequence[str]],
    grad_norms: Sequence[float] | None,
) -> BackendError:
    """Return the error for a refused optimizer step.

    Args:
        trainer: role and rank, for the message.
        update: number of the step, from 0.
        losses: loss of each micro-batch of this rank.
        grad_norm: gradient norm of the whole step.
        sample_ids: sample ids of each micro-batch.
        grad_norms: gradient norm of each micro-batch alone; None if these norms include other ranks' gradients.
    """
    culprits: list[str] = []
    for number, (loss, ids) in enumerate(zip(losses, sample_ids, strict=True)):
        if not math.isfinite(loss) or (grad_norms is not None and not math.isfinite(grad_norms[number])):
            culprits.extend(ids)
    named = ", ".join(culprits[:NAMED_SAMPLES]) + (", ..." if len(culprits) > NAMED_SAMPLES else "")
    where = f"in the micro-batch of samples {named}" if culprits else "on another rank, or only in their sum"
    return BackendError(
        f"{trainer}: the loss ({math.fsum(losses)}) or the gradient norm ({grad_norm}) of optimizer step {update} is"
        f" not finite, {where}. The weights are unchanged. Look at these samples' rewards and logprobs; a lower"
        " learning_rate or param_dtype: float32 may help."
    )
