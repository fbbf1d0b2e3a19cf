"""Which roles take turns on which devices, as text."""

from __future__ import annotations

from collections.abc import Sequence

from chatlearn_core.executor.device_sharing import ScheduledDeviceUse, Sharing
from chatlearn_core.protocols import Device


def sharing_lines(sharing: Sharing, steps: Sequence[ScheduledDeviceUse]) -> list[str]:
    """Lines for users: which roles take turns on which devices, and which parts move when."""
    if not sharing.devices:
        return ["nothing is moved: no two roles share memory, or memory.offload leaves them in it"]
    lines = []
    shared: dict[str, list[Device]] = {}
    for device in sorted(frozenset().union(*sharing.devices.values())):
        guests = ", ".join(role for role, own in sharing.devices.items() if device in own)
        shared.setdefault(guests, []).append(device)
    for guests, (first, *others) in shared.items():
        more = f" and {len(others)} more, up to {others[-1].place}" if others else ""
        lines.append(f"{guests} take turns on {first.place}{more}")
    lines += [f"before {step.name:<24} {'; '.join(map(str, step.moves)) or 'nothing moves'}" for step in steps]
    return lines
