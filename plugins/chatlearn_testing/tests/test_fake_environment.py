"""Fake distributions are found as real ones are, here and in child processes, and are gone after the test."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata

import pytest

from chatlearn_testing.fake_environment import FakeEnvironment


def test_a_distribution_has_metadata_modules_and_an_entry_point(fake_environment: FakeEnvironment) -> None:
    fake_environment.install(
        "Acme-Engine", "LOADED = True", version="1.2", requires=["numpy>=1"], modules={"acme_side": "SIDE = 3"}
    )
    found = metadata.distribution("acme-engine")
    assert (found.metadata["Name"], found.version, found.requires) == ("Acme-Engine", "1.2", ["numpy>=1"])
    [point] = [point for point in found.entry_points if point.group == "chatlearn"]
    assert point.load().LOADED
    assert importlib.import_module("acme_side").SIDE == 3


def test_child_processes_see_it_too(fake_environment: FakeEnvironment) -> None:
    fake_environment.install("acme-reward", "raise RuntimeError('no luck')")
    done = fake_environment.chatlearn("plugins", "list")
    assert (done.returncode, done.stderr) == (0, "")
    assert "RuntimeError: no luck" in done.stdout


@pytest.mark.parametrize("turn", [1, 2])
def test_its_modules_are_forgotten(fake_environment: FakeEnvironment, turn: int) -> None:
    assert "acme_number" not in sys.modules
    fake_environment.install("acme-number", modules={"acme_number": f"NUMBER = {turn}"})
    assert turn == importlib.import_module("acme_number").NUMBER
