"""Registers the schedule ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import ScheduleSpec


@hookimpl
def chatlearn_schedules() -> Iterable[ScheduleSpec]:
    """Register the schedule."""
    return [
        ScheduleSpec(
            name="acme",
            summary="From one value to another along half a cosine.",
            factory="acme_plugin.schedule:AcmeSchedule",
            options="acme_plugin.options:AcmeOptions",
        )
    ]
