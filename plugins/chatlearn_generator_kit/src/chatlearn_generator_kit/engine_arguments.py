"""Engine arguments that a backend sets itself. Imports nothing heavy: a configuration is checked without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def owned_problems(arguments: Mapping[str, Any], owned: Mapping[str, str]) -> dict[str, str]:
    """Each argument under ``roles.<role>.engine`` that the backend sets itself, and what to set instead.

    Args:
        arguments: of the configuration. Names that nobody owns are checked where the engine is.
        owned: names, and what to set instead.
    """
    return {name: f"owned by the backend; {owned[name]}" for name in arguments if name in owned}


def refused(role: str, target: str, problems: Mapping[str, str] | Iterable[str]) -> str:
    """The message about engine arguments that are not passed on.

    Args:
        role: whose.
        target: what they would have been passed to, such as ``vllm.EngineArgs``.
        problems: by argument, or as lines ``name: problem``.
    """
    lines = [f"{name}: {problem}" for name, problem in problems.items()] if isinstance(problems, Mapping) else problems
    return f"roles.{role}.engine holds arguments that cannot be passed to {target}:\n" + "\n".join(
        f"  {line}" for line in lines
    )
