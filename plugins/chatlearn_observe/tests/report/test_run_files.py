"""Reading run directories in every state."""

from __future__ import annotations

from pathlib import Path

from chatlearn_observe.report.run_files import read_run


def test_everything_of_a_whole_run(run_dir: Path) -> None:
    files = read_run(run_dir)
    assert [record["step"] for record in files.metrics] == list(range(7))
    assert [(file.kind, file.step) for file in files.rollout_files] == [
        ("eval", 0),
        *(("step", step) for step in range(1, 6)),
        ("eval", 6),
        ("step", 6),
    ]
    assert files.config["algorithm"] == {"name": "grpo"}
    assert files.notes == []


def test_a_half_written_last_line_is_left_out_and_said(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 7, "rew')
    files = read_run(run_dir)
    assert len(files.metrics) == 7
    assert files.notes == ["metrics.jsonl, line 8 is incomplete and is left out"]


def test_bad_lines_are_named_one_by_one(run_dir: Path) -> None:
    (run_dir / "events.jsonl").write_bytes(b'{"event": "a"}\nnot json\n\n[1]\n{"event": "b\xff"}\n')
    files = read_run(run_dir)
    assert [event["event"] for event in files.events] == ["a", "b\ufffd"]
    assert [note.split(" (")[0] for note in files.notes] == [
        "events.jsonl, line 2 cannot be read",
        "events.jsonl, line 4 is not a JSON object and is left out",
    ]


def test_a_step_written_again_replaces_the_earlier_one(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text(
        '{"step": 1, "reward": 1}\n{"step": 2}\n{"step": 1, "reward": 5}\n{"x": 1}\n'
    )
    files = read_run(run_dir)
    assert files.metrics == [{"step": 1, "reward": 5}, {"step": 2}]
    assert "without a whole number under 'step'" in files.notes[0]


def test_numbers_that_json_does_not_know_become_text(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "a": NaN, "b": -Infinity, "c": 1e999, "d": 1e-3}\n')
    assert read_run(run_dir).metrics == [{"step": 1, "a": "NaN", "b": "-Infinity", "c": "1e999", "d": 0.001}]


def test_broken_summary_and_config_are_said(run_dir: Path) -> None:
    (run_dir / "summary.json").write_text("{")
    (run_dir / "config.yaml").write_text("- a list\n")
    files = read_run(run_dir)
    assert files.summary == {}
    assert files.config == {}
    assert "summary.json cannot be read" in files.notes[0]
    assert files.notes[1] == "config.yaml contains a list, not a mapping, and is left out"
