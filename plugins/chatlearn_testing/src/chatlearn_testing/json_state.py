"""What happens to the state of a checkpoint: it is stored as JSON, overwritten after it was loaded, and damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def stored(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state as a checkpoint gives it back.

    Raises:
        AssertionError: JSON cannot hold it, or it is no dict.
    """
    assert isinstance(state, dict), f"state_dict returned {state!r:.200}; it is a dict of JSON values"
    try:
        loaded: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"JSON cannot hold the state {state!r:.200}: {error}") from error
    return loaded


def spoil(state: Any) -> None:
    """Overwrite everything inside a state."""
    if isinstance(state, dict):
        for value in state.values():
            spoil(value)
        state.clear()
    elif isinstance(state, list):
        for value in state:
            spoil(value)
        state.clear()


def damaged(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the state with nothing in it, without each of its entries, and with values of other types in each."""
    yield {}
    for key in state:
        yield {name: value for name, value in state.items() if name != key}
        for value in (None, "damaged", [None]):
            yield {**state, key: value}
