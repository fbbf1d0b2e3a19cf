"""Fakes have no engine, so they refuse every engine argument."""

from __future__ import annotations

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import RoleContext


def refuse_engine_arguments(context: RoleContext) -> None:
    """Raise ConfigError, naming the arguments, if the role has any."""
    if context.engine_arguments:
        raise ConfigError(
            f"roles.{context.role}.engine: a fake takes no engine arguments; remove"
            f" {', '.join(sorted(context.engine_arguments))}"
        )
