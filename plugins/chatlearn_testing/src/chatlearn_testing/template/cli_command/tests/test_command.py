from __future__ import annotations

from pathlib import Path

import pytest
from chatlearn_core.exceptions import DataError
from chatlearn_testing.suites import CliCommandConformance

from acme_plugin.command import last_metrics


class TestConformance(CliCommandConformance):
    backend = "acme"


def test_metrics_of_the_last_step_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"loss": 2}\n{"loss": 1, "lr": 0.5}\n')
    last_metrics(tmp_path)
    assert capsys.readouterr().out == "loss 1\nlr 0.5\n"
    last_metrics(tmp_path, prefix="lo")
    assert capsys.readouterr().out == "loss 1\n"


def test_what_is_no_run_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="metrics.jsonl cannot be read"):
        last_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="no step yet"):
        last_metrics(tmp_path)
