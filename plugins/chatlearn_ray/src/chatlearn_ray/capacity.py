"""Checks whether a cluster can hold the reservations, and shows the arithmetic. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from chatlearn_ray.placement import PlacementPlan
from chatlearn_ray.resources import TOLERANCE, ResourceAmounts, added, amounts_text


def shortage(placement_plan: PlacementPlan, nodes: Mapping[str, ResourceAmounts]) -> str | None:
    """Return why a cluster with these nodes can never hold the run, with the arithmetic; None if it may.

    Args:
        placement_plan: the reservations.
        nodes: node name -> its total resources, used or free.
    """
    have = added(nodes.values())
    need = placement_plan.total
    lines: list[str] = []
    for resource, amount in need.items():
        if amount > have.get(resource, 0.0) + TOLERANCE:
            parts = " + ".join(
                f"{sum(bundle.get(resource, 0.0) for bundle in group.bundles):g} ({group.name})"
                for group in placement_plan.groups
                if any(bundle.get(resource) for bundle in group.bundles)
            )
            lines.append(
                f"{resource}: {parts} = {amount:g}, but {len(nodes)} node(s) have {have.get(resource, 0.0):g}: "
                f"{amount - have.get(resource, 0.0):g} missing"
            )
    for group in placement_plan.groups:
        together = group.strategy == "STRICT_PACK"
        kinds = [added(group.bundles)] if together else list({str(b): b for b in group.bundles}.values())
        for wanted in kinds:
            fitting = [node for node in nodes.values() if _fits(wanted, node)]
            if not fitting:
                what = "together " if together and len(group.bundles) > 1 else ""
                reasons = f" ({'; '.join(group.why)})" if group.why else ""
                have_now = "; ".join(f"{name} has {amounts_text(node)}" for name, node in nodes.items())
                lines.append(
                    f"{group.name} needs {what}{amounts_text(wanted)} on one node{reasons}: "
                    f"{have_now or 'there is none'}"
                )
            elif group.strategy == "STRICT_SPREAD" and len(fitting) < len(group.bundles):
                lines.append(
                    f"{group.name} needs {len(group.bundles)} nodes with {amounts_text(wanted)} each, but only "
                    f"{len(fitting)} have it"
                )
    return "\n".join(f"  {line}" for line in lines) or None


def _fits(amounts: ResourceAmounts, node: ResourceAmounts) -> bool:
    return all(amount <= node.get(resource, 0.0) + TOLERANCE for resource, amount in amounts.items())
