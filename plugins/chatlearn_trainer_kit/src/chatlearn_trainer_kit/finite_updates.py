"""Refusal of an optimizer step whose loss or gradient norm is not finite: the weights stay, the samples are named."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from chatlearn_core.exceptions import BackendError

NAMED_SAMPLES = 16
"""How many sample ids an error lists."""


def all_finite(values: Sequence[float], agree: Callable[[bool], bool] | None = None) -> bool:
    """Whether the numbers are finite, on every rank.

    Args:
        values: this rank's.
        agree: takes this rank's finding and returns whether all ranks' are true; None: there is one rank.
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
    """The error of an optimizer step that was not made.

    Args:
        trainer: for the message: role and rank.
        update: number of the step, from 0.
        losses: of each micro-batch of this rank.
        grad_norm: of the whole step.
        sample_ids: of each micro-batch.
        grad_norms: of each micro-batch computed alone; None where they hold other ranks' gradients, too.
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
