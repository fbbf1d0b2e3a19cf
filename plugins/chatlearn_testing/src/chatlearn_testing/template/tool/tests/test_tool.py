from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import ToolError
from chatlearn_testing.suites import ToolConformance

from acme_plugin.conformance import SETTINGS
from acme_plugin.options import AcmeOptions
from acme_plugin.tool import AcmeTool


class TestConformance(ToolConformance):
    backend = "acme"
    options = SETTINGS["tool/acme"]["options"]
    cases = SETTINGS["tool/acme"]["cases"]
    refused_options = SETTINGS["tool/acme"]["refused_options"]


def test_the_answer_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("a1\nb\na2\na3\n", encoding="utf-8")
    options = AcmeOptions(path=str(file), max_lines=2)
    source = AcmeTool(options)
    [tool] = source.open()
    try:
        assert asyncio.run(tool.run({"word": "a"})) == "1: a1\n3: a2"
        assert asyncio.run(tool.run({"word": "a", "skip": 2})) == "4: a3"
        with pytest.raises(ToolError, match="3 lines contain 'a', and 3 are left out"):
            asyncio.run(tool.run({"word": "a", "skip": 3}))
    finally:
        source.close()


def test_a_file_that_is_missing_is_an_error_before_any_rollout(tmp_path: Path) -> None:
    options = AcmeOptions(path=str(tmp_path / "missing.txt"))
    source = AcmeTool(options)
    with pytest.raises(ConfigError, match="correct its option path"):
        source.open()
