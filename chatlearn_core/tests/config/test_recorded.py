from typing import Any

import pytest

from chatlearn_config.interpolation import resolve
from chatlearn_core.config.load import load_config
from chatlearn_core.config.models import RunConfig
from chatlearn_core.config.recorded import environment_texts, recorded_values
from chatlearn_core.config.show import to_yaml
from chatlearn_core.plugins.registry import PluginRegistry


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_TOKEN", "s3cret")
    monkeypatch.setenv("ACME_STEPS", "7")


def kept(values: dict[Any, Any]) -> dict[str, str]:
    resolved, problems, _ = resolve(values, RunConfig)
    assert problems == []
    return {".".join(map(str, path)): text for path, text in environment_texts(values, resolved).items()}


def test_text_from_the_environment_is_kept_as_written_and_numbers_are_not() -> None:
    values = {
        "a": ["${oc.env:ACME_TOKEN}", "Bearer ${oc.env:ACME_TOKEN}"],
        "b": "${oc.env:ACME_NONE,none}",
        "c": "${oc.decode:${oc.env:ACME_STEPS}}",
        "name": "x",
        "e": "run-${name}",
    }
    assert kept(values) == {
        "a.0": "${oc.env:ACME_TOKEN}",
        "a.1": "Bearer ${oc.env:ACME_TOKEN}",
        "b": "${oc.env:ACME_NONE,none}",
    }


@pytest.mark.parametrize(
    "reference",
    ["${keys.token}", "${.other}", "${..keys.token}", "is ${keys.token}", "${keys}", "${list[0]}", "${list.0}"],
)
def test_what_other_settings_insert_of_it_is_kept_too(reference: str) -> None:
    values = {
        "keys": {"token": "${oc.env:ACME_TOKEN}"},
        "list": ["${keys.token}", "plain"],
        "judge": {"other": "${keys.token}", "key": reference, "plain": "${list[1]}"},
    }
    assert kept(values)["judge.key"] == reference
    assert "judge.plain" not in kept(values)


def test_recorded_settings_load_to_the_same_run_and_hold_no_secret(valid: str, registry: PluginRegistry) -> None:
    settings = ["data.system_prompt='${oc.env:ACME_TOKEN}'", "name='a \\${b'", "sampling.max_tokens=${.top_k}"]
    loaded = load_config(valid, [*settings, "sampling.top_k=9"], registry)
    assert loaded.config.data.system_prompt == "s3cret"
    text = to_yaml(recorded_values(loaded))
    assert "s3cret" not in text
    assert "system_prompt: ${oc.env:ACME_TOKEN}" in text
    assert "max_tokens: 9" in text
    again = load_config(text, (), registry)
    assert again.config == loaded.config
    assert recorded_values(again) == recorded_values(loaded)
