"""Import strings, ``"package.module:Attribute"``: checked without importing, imported when selected."""

from __future__ import annotations

import importlib
from typing import Any

RULE = "an import string is 'package.module:Attribute'"


def import_string_problem(value: object) -> str | None:
    """The reason why ``value`` is not an import string, or None if it is one. Imports nothing."""
    if not isinstance(value, str):
        return f"{value!r} is a {type(value).__name__}; {RULE}"
    module, colon, attribute = value.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        return f"{value!r} is not an import string; {RULE}"
    return None


def resolve_import_string(value: str) -> Any:
    """Import the attribute named by an import string.

    Raises:
        ValueError: ``value`` is not an import string.
        ImportError: the module is missing, or does not have the attribute.
        Exception: any exception that the module raises while it is imported.
    """
    if problem := import_string_problem(value):
        raise ValueError(problem)
    module_name, _, attribute = value.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ImportError(f"module {module_name!r} has no attribute {attribute!r}", name=module_name) from None
    return found
