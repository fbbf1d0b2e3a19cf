"""How a contract test says that it does not concern a plugin, because of what the plugin's record declares."""

from __future__ import annotations

from typing import NoReturn

import pytest

NOT_APPLICABLE = "not applicable: "
"""Start of the reason of such a skip, which tells it from a test that could not run."""


def not_applicable(reason: str) -> NoReturn:
    """End a contract test: the record says that it does not apply."""
    pytest.skip(NOT_APPLICABLE + reason)
