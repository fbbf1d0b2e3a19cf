"""Skips a contract test that does not apply to a plugin, given the capabilities that the plugin's record declares."""

from __future__ import annotations

from typing import NoReturn

import pytest

NOT_APPLICABLE = "not applicable: "
"""Prefix of the skip reason; distinguishes an inapplicable test from one that could not run."""


def not_applicable(reason: str) -> NoReturn:
    """Skip the current contract test because the record makes it inapplicable.

    Args:
        reason: the declaration, or missing declaration, that decides so.
    """
    pytest.skip(NOT_APPLICABLE + reason)
