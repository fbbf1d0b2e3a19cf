"""Engine arguments that a backend sets itself. Imports nothing heavy, so that configurations are checked
without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def owned_problems(arguments: Mapping[str, Any], owned: Mapping[str, str]) -> dict[str, str]:
    """Return each argument under ``roles.<role>.engine`` that the backend sets itself, with what to set instead.

    Args:
        arguments: ``engine`` section of the configuration. The engine checks all other names.
        owned: names that the backend sets, with what to set instead.
    """
    return {name: f"owned by the backend; {owned[name]}" for name in arguments if name in owned}


def refused(role: str, target: str, problems: Mapping[str, str] | Iterable[str]) -> str:
    """Return the error message for refused engine arguments.

    Args:
        role: name of the role.
        target: the class or function that would have taken them, such as ``vllm.EngineArgs``.
        problems: problems by argument, or lines ``name: problem``.
    """
    lines = [f"{name}: {problem}" for name, problem in problems.items()] if isinstance(problems, Mapping) else problems
    return f"roles.{role}.engine holds arguments that cannot be passed to {target}:\n" + "\n".join(
        f"  {line}" for line in lines
    )
