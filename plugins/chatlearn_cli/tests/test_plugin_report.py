from __future__ import annotations

import json

from chatlearn_cli.plugin_report import plugins_json, plugins_text, record_text
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.records import CliCommandSpec, TrainerSpec
from chatlearn_core.plugins.registry import PluginRegistry

TRAINER = PluginEntry(
    name="fsdp",
    kind="trainer",
    distribution="chatlearn-fsdp",
    version="0.1.0",
    status="ok",
    record=TrainerSpec(
        name="fsdp",
        summary="FSDP2.",
        factory="m:F",
        options="m:O",
        requires=(("torch>=2", "torch-cpu>=2"), ("numpy",)),
        outputs=frozenset({"values", "logprobs"}),
    ),
)
BROKEN = PluginEntry(
    name="acme", kind=None, distribution="acme", version="1", status="failed", reason="ImportError: no acme"
)
COMMAND = PluginEntry(
    name="data",
    kind="cli_command",
    distribution="chatlearn-data",
    version="0.1.0",
    status="ok",
    record=CliCommandSpec(name="data", app="m:app", help="Prepare data."),
)


def test_the_list_shows_a_summary_or_a_reason() -> None:
    text = plugins_text(PluginRegistry((BROKEN, COMMAND, TRAINER), warnings=("odd",)))
    assert text.splitlines() == [
        "KIND         NAME  DISTRIBUTION    VERSION  STATUS",
        "?            acme  acme            1        failed  ImportError: no acme",
        "cli_command  data  chatlearn-data  0.1.0    ok      Prepare data.",
        "trainer      fsdp  chatlearn-fsdp  0.1.0    ok      FSDP2.",
        "warning: odd",
    ]


def test_the_list_as_plain_data() -> None:
    shown = json.loads(json.dumps(plugins_json(PluginRegistry((BROKEN, TRAINER)))))
    assert shown["plugin_api_version"] == 2
    assert shown["plugins"][0] == {
        "name": "acme",
        "kind": None,
        "distribution": "acme",
        "version": "1",
        "status": "failed",
        "reason": "ImportError: no acme",
        "summary": "",
    }


def test_a_record_field_by_field() -> None:
    lines = dict(line.split(maxsplit=1) for line in record_text(TRAINER).splitlines())
    assert lines["distribution"] == "chatlearn-fsdp 0.1.0"
    assert lines["requires"] == "torch>=2 or torch-cpu>=2, numpy"
    assert lines["outputs"] == "logprobs, values"
    assert lines["max_ranks"] == "any"
    assert record_text(BROKEN).splitlines()[-1] == "status        failed: ImportError: no acme"
