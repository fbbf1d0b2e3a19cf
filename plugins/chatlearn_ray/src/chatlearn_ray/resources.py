"""Sums and descriptions of Ray resources. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

ResourceAmounts = Mapping[str, float]
"""Ray resource name (``CPU``, ``GPU``, custom) -> amount. Example: ``{"CPU": 1.0, "GPU": 0.5}``."""
TOLERANCE = 1e-6
"""Tolerance of comparisons; Ray counts in ten-thousandths."""


def added(parts: Iterable[ResourceAmounts]) -> dict[str, float]:
    """Return the sum of each resource."""
    total: dict[str, float] = {}
    for part in parts:
        for resource, amount in part.items():
            total[resource] = total.get(resource, 0.0) + amount
    return total


def positive(amounts: ResourceAmounts) -> dict[str, float]:
    """Return the amounts without zeros."""
    return {resource: amount for resource, amount in amounts.items() if amount > 0}


def floored(amount: float) -> float:
    """Round down to Ray's precision, so that equal shares never exceed the whole."""
    return int(amount * 10_000 + TOLERANCE) / 10_000


def amounts_text(amounts: ResourceAmounts) -> str:
    """Describe amounts as ``1 CPU, 0.5 GPU``, without the resources that Ray adds (memory, node names)."""
    shown = [f"{amount:g} {resource}" for resource, amount in _interesting(amounts)]
    return ", ".join(shown) or "nothing"


def _interesting(amounts: ResourceAmounts) -> Iterator[tuple[str, float]]:
    for resource, amount in amounts.items():
        if resource not in ("memory", "object_store_memory") and not resource.startswith("node:"):
            yield resource, amount
