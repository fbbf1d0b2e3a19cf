"""Values that are too large, too long, infinite or without a place are refused; unlikely ones are a warning."""

from __future__ import annotations

import json
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from chatlearn_core.config.invalid import InvalidConfigError
from chatlearn_core.config.load import load_config
from chatlearn_core.plugins.registry import PluginRegistry

NAME = "n" * 256
REFUSED = {
    "dataset weight": (["data.train.0.weight=.inf"], "data.train.0.weight: must be a finite number (got inf)"),
    "reward weight": (
        ["~roles.reward.backend", "roles.reward.parts=[{backend: math, weight: .nan}]"],
        "roles.reward.parts.0.weight: must be a finite number (got nan)",
    ),
    "option of a plugin": (["roles.trainer.options.lr=1e999"], "roles.trainer.options.lr: must be a finite number"),
    "deep in options": (["roles.trainer.options.betas=[0.9, .inf]"], "options.betas.1: must be a finite number"),
    "engine argument": (["roles.generator.engine={a: [-.inf]}"], "roles.generator.engine.a.0: must be a finite number"),
    "timeout": (["roles.trainer.timeout_s=1e300"], "roles.trainer.timeout_s: must be less than or equal to 1000000000"),
    "replicas": (["roles.generator.replicas=1000000000000"], "roles.generator.replicas: must be less than or equal to"),
    "NUL": (['model.path="a\\0b"'], "model.path: must not hold a NUL character (got 'a\\x00b')"),
    "NUL in a key": (['roles.trainer.engine={"a\\0": 1}'], "a key must not hold a NUL character"),
    "empty stop": (["sampling.stop=['']"], "sampling.stop.0: String should have at least 1 character (got '')"),
    "empty stop of evaluation": (
        ["data.eval=[{path: e}]", "eval.sampling.stop=['a', '']"],
        "eval.sampling.stop.1: String should have at least 1 character",
    ),
    "user": (["data.train.0.path=~nosuchuser/x"], "'~nosuchuser' means the home directory of a user who does not"),
    "home": (
        ["model.path=~homeless/x"],
        "model.path: '~homeless' means /nonexistent/homeless, which does not exist",
    ),
    "home of data": (["data.train.0.path=~homeless/x"], "data.train.0.path: '~homeless' means /nonexistent/homeless"),
    "home of output": (["output_dir=~homeless"], "output_dir: '~homeless' means /nonexistent/homeless, which does"),
    "file as directory": (
        ["output_dir=pyproject.toml"],
        "output_dir: is a file; it must be a directory (got",
    ),
    "device as directory": (["output_dir=/dev/null"], "output_dir: is a device; it must be a directory"),
    "below a file": (["output_dir=/dev/null/runs/a"], "output_dir: lies below /dev/null, which is not a directory"),
    "name": ([f"output_dir=runs/{NAME}"], "output_dir: has a part of 256 bytes; file systems take names of up to 255"),
    "path": (["model.path=" + "a/" * 2100], "model.path: has "),
    "room below": (["output_dir=" + "/a" * 1900], "output_dir: has 3800 bytes; a path may have 3583"),
    "prompts": (["train.prompts_per_step=1099511627776"], "prompts_per_step: makes 4398046511104 samples of one step"),
    "group": (["algorithm.options.group_size=1099511627776"], "at most 1048576 are held at a time (got 4)"),
    "in flight": (
        ["rollout.partial=none", "rollout.in_flight_prompts=1099511627776"],
        "rollout.in_flight_prompts: makes 4398046511104 samples",
    ),
    "runtime auto": (["runtime.backend=auto"], "No runtime named 'auto'"),
    "algorithm auto": (["algorithm.name=auto"], "No algorithm named 'auto'"),
    "device": (["roles.trainer.device=GPU 0"], "roles.trainer.device: is no device (got 'GPU 0')"),
    "device of no backend": (
        ["roles.trainer.device=mps"],
        "roles.trainer.device: trainer 'fsdp' does not run on mps; it runs on: cpu, cuda (got 'mps')",
    ),
    "device of another backend": (
        ["roles.generator.device=mps:0"],
        "'transformers' does not run on mps; it runs on: ",
    ),
    "device without weights": (["roles.trainer.device=meta"], "roles.trainer.device: is no device (got 'meta')"),
}


@pytest.fixture(autouse=True)
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whose home directory is not there, and a working directory with a file."""
    real, gone = pwd.getpwnam, SimpleNamespace(pw_dir="/nonexistent/homeless")
    monkeypatch.setattr(pwd, "getpwnam", lambda name: gone if name == "homeless" else real(name))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, valid: str, registry: PluginRegistry) -> None:
    overrides, expected = REFUSED[name]
    with pytest.raises(InvalidConfigError) as caught:
        load_config(valid, overrides, registry)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["roles.trainer.timeout_s=1e9", "data.train.0.weight=1e-300"],
        ["train.prompts_per_step=262144"],  # 4 samples each: 2**20
        ["roles.trainer.device=cuda:15", "roles.generator.device=xpu:0"],
        [f"output_dir=runs/{'n' * 255}", "model.path=~/model"],
    ],
)
def test_at_the_limit_nothing_is_told(overrides: list[str], valid: str, registry: PluginRegistry) -> None:
    assert load_config(valid, overrides, registry).warnings == ()


def test_a_relative_path_is_measured_from_the_working_directory(
    valid: str, registry: PluginRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path.joinpath(*["d" * 250] * 13)
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    with pytest.raises(InvalidConfigError, match=r"output_dir: has \d+ bytes; a path may have 3583"):
        load_config(valid, ["output_dir=" + "a" * 250 + "/" + "b" * 250], registry)


CAUTIONS = {
    "stops": (
        [f"sampling.stop={json.dumps([str(i) for i in range(10_000)])}"],
        "sampling.stop: sampling searches for 10000 stop texts after every token",
    ),
    "twice": (
        ["data.train=[{path: a.jsonl}, {path: b.jsonl}, {path: a.jsonl}]"],
        "data.train.2.path: the same dataset twice (got 'a.jsonl')\n    data.train.0.path = 'a.jsonl'",
    ),
    "evaluated on": (
        ["data.eval=[{path: data/train.jsonl}]"],
        "data.eval.0.path: the run also trains on this dataset, so its evaluation score says little about other data",
    ),
}


@pytest.mark.parametrize("name", CAUTIONS)
def test_told(name: str, valid: str, registry: PluginRegistry) -> None:
    overrides, expected = CAUTIONS[name]
    (warning,) = load_config(valid, overrides, registry).warnings
    assert expected in warning


def test_other_splits_and_other_rows_are_other_data(valid: str, registry: PluginRegistry) -> None:
    same = (
        "{path: owner/name, split: train}, {path: owner/name, split: test}, {path: owner/name, split: test, limit: 5}"
    )
    assert load_config(valid, [f"data.train=[{same}]"], registry).warnings == ()
