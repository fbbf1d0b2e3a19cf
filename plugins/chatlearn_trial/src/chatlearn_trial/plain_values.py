"""Plain values and dataclasses of one module as text, and back without running code of others."""

from __future__ import annotations

import io
import pickle
from dataclasses import is_dataclass
from typing import Any


def packed(value: object) -> str:
    """The text of a value."""
    return pickle.dumps(value).hex()


def unpacked(text: str, module: str) -> Any:
    """The value of a text that ``packed`` made.

    Args:
        module: the only one whose dataclasses may occur.

    Raises:
        ValueError: the text was not made by ``packed``, or holds anything else.
    """
    try:
        return _PlainValues(io.BytesIO(bytes.fromhex(text)), module).load()
    except Exception as error:  # what unpickling a damaged text may raise has no end
        raise ValueError(f"not plain values and dataclasses of {module}: {error}") from error


class _PlainValues(pickle.Unpickler):
    def __init__(self, text: io.BytesIO, module: str) -> None:
        super().__init__(text)
        self._module = module

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module == self._module and "." not in name else None
        if isinstance(found, type) and is_dataclass(found):
            return found
        raise pickle.UnpicklingError(f"{module}.{name}")
