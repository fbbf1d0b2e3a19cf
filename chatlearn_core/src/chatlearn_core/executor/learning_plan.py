"""The updates that an algorithm plans for a whole run: trained roles, their losses, and the number of optimizer
steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chatlearn_core.config.models import TrainConfig
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import Algorithm, Loss


@dataclass(slots=True, frozen=True)
class LearningPlan:
    """The updates of a run, summed over its steps. Roles are in the order of their first update."""

    losses: Mapping[str, tuple[Loss, ...]]
    """Role -> one loss per distinct set of outputs that its losses read."""
    num_updates: Mapping[str, int]
    """Role -> maximum number of optimizer steps in the whole run; a step with few samples makes fewer."""

    @property
    def learners(self) -> tuple[str, ...]:
        """The roles that learn."""
        return tuple(self.losses)


def learning_plan(algorithm: Algorithm, train: TrainConfig, name: str) -> LearningPlan:
    """Collect the updates that the algorithm plans for every step.

    Raises:
        ConfigError: it plans passes or mini-batches below 1, or trains nothing; names algorithm, step and role.
    """
    losses: dict[str, list[Loss]] = {}
    num_updates: dict[str, int] = {}
    for step in range(1, train.steps + 1):
        for update in algorithm.updates(step):
            epochs = train.epochs if update.epochs is None else update.epochs
            mini_batches = train.mini_batches if update.mini_batches is None else update.mini_batches
            if epochs < 1 or mini_batches < 1:
                raise ConfigError(
                    f"algorithm {name!r} plans {epochs} epochs of {mini_batches} mini-batches for role {update.role!r} "
                    f"in step {step}; both must be at least 1. A role that rests has no RoleUpdate in that step"
                )
            known = losses.setdefault(update.role, [])
            if all(loss.needs != update.loss.needs for loss in known):
                known.append(update.loss)
            num_updates[update.role] = num_updates.get(update.role, 0) + epochs * mini_batches
    if not losses:
        raise ConfigError(
            f"algorithm {name!r} trains no role in {train.steps} steps (train.steps): its updates(step) is always empty"
        )
    return LearningPlan({role: tuple(of_role) for role, of_role in losses.items()}, num_updates)
