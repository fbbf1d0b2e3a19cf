"""``chatlearn report`` as a user calls it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from chatlearn_cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["report", *arguments])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_it_writes_into_the_run_directory(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(run_dir), "--token-ids")
    assert code == 0
    assert f"wrote {run_dir / 'report.html'} (steps: 6, rollouts: 78)" in out
    assert (run_dir / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_another_file_and_fewer_rollouts(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(run_dir), "-o", str(tmp_path / "x.html"), "--max-rollouts", "0")
    assert code == 0
    assert "(steps: 6, rollouts: 0)" in out
    assert "none were asked for" in (tmp_path / "x.html").read_text(encoding="utf-8")
    assert not (run_dir / "report.html").exists()


def test_a_missing_model_is_said_and_not_fatal(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, str(run_dir))
    assert code == 0
    assert "tokens are shown as ids" in err
    assert "models/tiny" in err


def test_no_such_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, str(tmp_path / "nowhere"))
    assert code == 2
    assert f"directory {tmp_path / 'nowhere'} does not exist" in err


def test_a_directory_that_is_no_run_names_the_runs_below_it(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, str(tmp_path))
    assert code == 2
    assert "neither config.yaml nor metrics.jsonl" in err
    assert "Runs below it: run." in err


def test_a_file_that_cannot_be_written(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, str(run_dir), "--token-ids", "-o", str(run_dir / "no" / "x.html"))
    assert code == 2
    assert "cannot write the report" in err
    assert "--output" in err


def test_a_run_with_nothing_in_it_yet(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "summary.json", "flow.svg"):
        (run_dir / name).unlink()
    shutil.rmtree(run_dir / "rollouts")
    code, out, _ = run(capsys, str(run_dir))
    assert code == 0
    assert "(steps: 0, rollouts: 0)" in out
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "No metrics yet" in page
    assert "Running, or killed" in page
