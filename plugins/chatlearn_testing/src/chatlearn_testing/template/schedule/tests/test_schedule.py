from __future__ import annotations

from chatlearn_testing.suites import ScheduleConformance

from acme_plugin.conformance import SETTINGS
from acme_plugin.options import AcmeOptions
from acme_plugin.schedule import AcmeSchedule


class TestConformance(ScheduleConformance):
    backend = "acme"
    options = SETTINGS["schedule/acme"]["options"]
    values = SETTINGS["schedule/acme"]["values"]
    bounds = SETTINGS["schedule/acme"]["bounds"]
    bad_options = SETTINGS["schedule/acme"]["bad_options"]


def test_it_is_slow_at_both_ends() -> None:
    options = AcmeOptions(start=0.0, end=1.0, last_step=11)
    schedule = AcmeSchedule(options)
    rises = [schedule.value(step + 1) - schedule.value(step) for step in range(1, 11)]
    assert max(rises[0], rises[-1]) < min(rises[1:-1])
