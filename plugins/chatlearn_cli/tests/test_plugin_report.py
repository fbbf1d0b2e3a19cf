from __future__ import annotations

import json
from dataclasses import replace

from chatlearn_cli.plugin_report import plugins_json, plugins_text, record_fields, record_text
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.records import CliCommandSpec, RewardSpec, RoleUse, TrainerSpec
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


def test_the_roles_that_a_reward_calls_are_shown_as_text_and_as_json() -> None:
    uses = {"judge": RoleUse(kinds=frozenset({"generator"}))}
    record = RewardSpec(name="judge", summary="A judge.", factory="m:F", options="m:O", uses=uses)
    entry = replace(TRAINER, name="judge", kind="reward", record=record)
    lines = dict(line.split(maxsplit=1) for line in record_text(entry).splitlines())
    told = "judge (kinds: generator; outputs: none; scores: False; classifies: False; token_ids: False)"
    assert lines["uses"] == told
    assert json.loads(json.dumps(record_fields(entry)))["uses"]["judge"]["kinds"] == ["generator"]
