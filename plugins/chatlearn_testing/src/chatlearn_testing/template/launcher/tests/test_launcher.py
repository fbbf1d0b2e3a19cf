from __future__ import annotations

import pytest
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import NodePart
from chatlearn_testing.suites import LauncherConformance

from acme_plugin.conformance import SETTINGS
from acme_plugin.launcher import acme

POD = {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "2", "JOB_HEAD": "train-0.train"}


class TestConformance(LauncherConformance):
    backend = "acme"
    cases = SETTINGS["launcher/acme"]["cases"]
    foreign = SETTINGS["launcher/acme"]["foreign"]


def test_the_index_is_the_rank() -> None:
    assert acme(POD) == NodePart(1, 2, "train-0.train")


def test_an_index_beyond_the_completions_names_both() -> None:
    with pytest.raises(ConfigError, match="JOB_COMPLETION_INDEX is 2, and JOB_COMPLETIONS is 2"):
        acme(POD | {"JOB_COMPLETION_INDEX": "2"})
