from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from chatlearn_core.plugins.compatibility import choose_transport
from chatlearn_core.plugins.records import GeneratorSpec, TrainerSpec
from chatlearn_sync.plugin import chatlearn_weight_syncs

RECORDS = {record.name: record for record in chatlearn_weight_syncs()}


def test_both_transports_are_registered_with_what_they_need():
    direct, checkpoint = RECORDS["direct"], RECORDS["checkpoint"]
    assert (direct.reach, direct.channels, direct.exports) == ("process", ("tensors",), ("full_tensors",))
    assert (checkpoint.reach, checkpoint.channels[0], checkpoint.replayable) == ("anywhere", "checkpoint", True)
    assert direct.speed_rank < checkpoint.speed_rank


@pytest.mark.parametrize(
    ("placement", "rolling", "name"),
    [
        ("process", False, "direct"),
        ("host", False, "shared_memory"),
        ("host", True, "shared_memory"),
        ("anywhere", False, "broadcast"),
        ("anywhere", True, "delta"),
    ],
)
def test_auto_takes_the_nearest_that_reaches(placement, rolling, name):
    trainer = TrainerSpec(name="t", factory="m:T", options="m:O")
    generator = GeneratorSpec(name="g", factory="m:G", options="m:O", channels=frozenset({"tensors", "checkpoint"}))
    chosen, _ = choose_transport(trainer, generator, list(RECORDS.values()), placement, rolling=rolling)
    assert chosen.name == name


@pytest.mark.parametrize("name", sorted(RECORDS))
@pytest.mark.parametrize("attribute", ["sender", "receiver", "options"])
def test_import_strings_lead_somewhere(name, attribute):
    module, _, attribute_name = getattr(RECORDS[name], attribute).partition(":")
    assert callable(getattr(import_module(module), attribute_name))


def test_listing_imports_nothing_heavy():
    code = (
        "import sys, chatlearn_sync.plugin, chatlearn_sync.options;"
        "print([m for m in ('torch', 'safetensors', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
