"""``chatlearn plugins matrix`` as a user calls it."""

from __future__ import annotations

import json

import pytest

TRIO = """
from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import GeneratorSpec, TrainerSpec, WeightSyncSpec

@hookimpl
def chatlearn_trainers():
    return [TrainerSpec(name="acme_t", factory="m:F", options="m:O", exports=frozenset({"boxes"}))]

@hookimpl
def chatlearn_generators():
    return [GeneratorSpec(name="acme_g", factory="m:F", options="m:O", channels=frozenset({"boxes"}))]

@hookimpl
def chatlearn_weight_syncs():
    code = dict(sender="m:S", receiver="m:R", options="m:O")
    return [
        WeightSyncSpec(name="acme_s", exports=("boxes",), channels=("boxes",), **code),
        WeightSyncSpec(name="acme_w", **code),
    ]
"""


@pytest.mark.parametrize("recorded", [None, "option", "environment"])
def test_matrix(fake_environment, tmp_path, monkeypatch, recorded: str | None) -> None:
    fake_environment.install("trio", TRIO)
    file = tmp_path / "kit.json"
    result = {"trainer": "acme_t", "generator": "acme_g", "weight_sync": "acme_s", "passed": True}
    file.write_text(json.dumps({"results": [result]}))
    monkeypatch.delenv("CHATLEARN_TESTED_MATRIX", raising=False)
    if recorded == "environment":
        monkeypatch.setenv("CHATLEARN_TESTED_MATRIX", str(file))
    given = ["--tested", str(file)] if recorded == "option" else []
    done = fake_environment.chatlearn("plugins", "matrix", "--json", *given)
    rows = {
        row["weight_sync"]: row
        for row in json.loads(done.stdout)["combinations"]
        if (row["trainer"], row["generator"]) == ("acme_t", "acme_g")
    }
    assert (rows["acme_s"]["fits"], rows["acme_w"]["fits"]) == (True, False)
    assert rows["acme_w"]["reasons"] == [
        "transport 'acme_w' carries export 'full_tensors'; trainer 'acme_t' exports 'boxes'",
        "transport 'acme_w' delivers by channel 'tensors' between hosts; generator 'acme_g' takes channels 'boxes'",
    ]
    assert rows["acme_s"]["tested"] == ({"passed": True, "detail": ""} if recorded else None)
