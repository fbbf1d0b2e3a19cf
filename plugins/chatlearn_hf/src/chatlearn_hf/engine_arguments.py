"""Checks the engine arguments that backends on transformers models pass to ``from_pretrained``.

Imports nothing heavy, so that configurations are checked without torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

PASSED: Mapping[str, tuple[type, ...]] = {
    "cache_dir": (str,),
    "experts_implementation": (str,),
    "key_mapping": (dict,),
    "local_files_only": (bool,),
    "proxies": (dict,),
    "revision": (str,),
    "subfolder": (str,),
    "token": (str, bool),
    "use_safetensors": (bool,),
    "variant": (str,),
}
"""Arguments of ``from_pretrained`` that select the source of weights or the kernels, with their types."""


def argument_problems(
    arguments: Mapping[str, Any], owned: Mapping[str, str], fields: Collection[str] | None = ()
) -> dict[str, str]:
    """Return each argument that cannot be passed on, with the reason and the remedy.

    Args:
        arguments: content of ``roles.<role>.engine``.
        owned: arguments that the backend sets itself, with what to set instead.
        fields: fields of the model's configuration, which may be set too; None if they are unknown here: then any other
            name is accepted.
    """
    known = [*PASSED, *(fields or ())]
    problems: dict[str, str] = {}
    for name, value in arguments.items():
        if name in owned:
            problems[name] = f"owned by the backend; {owned[name]}"
        elif name in PASSED:
            if not isinstance(value, PASSED[name]) and value is not None:
                types = " or ".join(kind.__name__ for kind in PASSED[name])
                problems[name] = f"must be of type {types}, but is {value!r}"
        elif fields is not None and name not in fields:
            near = difflib.get_close_matches(name, [*known, *owned], n=1)
            problems[name] = "unknown" + (f"; did you mean {near[0]!r}?" if near else "")
    return problems


def refused(role: str, backend: str, problems: Mapping[str, str]) -> str:
    """Return the error message that lists all problems."""
    return (
        f"roles.{role}.engine holds arguments that {backend} does not pass to from_pretrained:\n"
        + "\n".join(f"  {name}: {problem}" for name, problem in problems.items())
        + f"\n  it passes: {', '.join(sorted(PASSED))}"
    )
