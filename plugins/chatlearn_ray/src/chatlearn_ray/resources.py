"""Amounts of Ray resources: sums and words for them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

ResourceAmounts = Mapping[str, float]
"""Ray resource name (``CPU``, ``GPU``, custom) -> amount."""
TOLERANCE = 1e-6
"""Ray counts in ten-thousandths."""


def added(parts: Iterable[ResourceAmounts]) -> dict[str, float]:
    """Sum by resource."""
    total: dict[str, float] = {}
    for part in parts:
        for resource, amount in part.items():
            total[resource] = total.get(resource, 0.0) + amount
    return total


def positive(amounts: ResourceAmounts) -> dict[str, float]:
    """Without what is zero."""
    return {resource: amount for resource, amount in amounts.items() if amount > 0}


def floored(amount: float) -> float:
    """To Ray's precision, so that equal shares never exceed the whole."""
    return int(amount * 10_000 + TOLERANCE) / 10_000


def amounts_text(amounts: ResourceAmounts) -> str:
    """``1 CPU, 0.5 GPU``; what Ray adds by itself (memory, node names) is left out."""
    shown = [f"{amount:g} {resource}" for resource, amount in _interesting(amounts)]
    return ", ".join(shown) or "nothing"


def _interesting(amounts: ResourceAmounts) -> Iterator[tuple[str, float]]:
    for resource, amount in amounts.items():
        if resource not in ("memory", "object_store_memory") and not resource.startswith("node:"):
            yield resource, amount
