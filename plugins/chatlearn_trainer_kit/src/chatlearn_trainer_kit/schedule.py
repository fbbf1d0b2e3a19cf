"""Learning-rate schedules in closed form, so that resuming needs only the step count."""

from __future__ import annotations

import math

from chatlearn_core.exceptions import ConfigError
from chatlearn_trainer_kit.options import OptimizerOptions


def check_schedule(options: OptimizerOptions, total_updates: int | None, role: str) -> None:
    """Refuse a schedule that cannot be computed.

    Raises:
        ConfigError: the schedule needs the length of the run, which is unknown, or the warm-up is longer than the run.
    """
    if options.schedule != "constant" and total_updates is None:
        raise ConfigError(
            f"roles.{role}.options.schedule is {options.schedule!r}, which needs the number of the run's optimizer"
            " steps,"
            " but the run has no end; set its number of steps, or schedule: constant."
        )
    if options.schedule != "constant" and total_updates is not None and options.warmup_steps >= total_updates > 0:
        raise ConfigError(
            f"roles.{role}.options.warmup_steps is {options.warmup_steps}, but the run makes only {total_updates}"
            " optimizer steps; the warm-up must be shorter."
        )


def learning_rate(options: OptimizerOptions, update: int, total_updates: int | None) -> float:
    """Return the learning rate of optimizer step ``update`` (from 0).

    Warm-up: peak * (update + 1) / warmup_steps, so that no step has rate 0. Then, with p = (update - warmup_steps) /
    (total_updates - warmup_steps), limited to 1, and m = min_lr_ratio: ``linear`` peak * (1 - (1 - m) p), ``cosine``
    peak * (m + (1 - m) (1 + cos(pi p)) / 2).
    """
    peak = options.learning_rate
    if update < options.warmup_steps:
        return peak * (update + 1) / options.warmup_steps
    if options.schedule == "constant" or total_updates is None:
        return peak
    progress = min(1.0, (update - options.warmup_steps) / max(1, total_updates - options.warmup_steps))
    if options.schedule == "linear":
        return peak * (1.0 - (1.0 - options.min_lr_ratio) * progress)
    return peak * (options.min_lr_ratio + (1.0 - options.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))
