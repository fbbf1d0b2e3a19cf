import yaml

from chatlearn_core.config.load import load_config
from chatlearn_core.config.show import resolved_values, to_yaml
from chatlearn_core.plugins.registry import PluginRegistry


def test_defaults_of_sections_and_plugins_are_filled_in(valid: str, registry: PluginRegistry) -> None:
    parts = "~roles.reward.backend", "roles.reward.parts=[{backend: math}, {backend: format}]"
    values = resolved_values(load_config(valid, parts, registry))
    assert values["sampling"]["max_tokens"] == 512
    assert values["roles"]["trainer"]["options"]["betas"] == [0.9, 0.95]
    assert [part["options"] for part in values["roles"]["reward"]["parts"]] == [{}, {"depth": 1}]
    assert list(values)[:3] == ["name", "output_dir", "seed"]


def test_text_that_looks_like_an_interpolation_is_escaped(valid: str, registry: PluginRegistry) -> None:
    loaded = load_config(valid, ["data.system_prompt='use \\${x}'"], registry)
    assert loaded.config.data.system_prompt == "use ${x}"
    assert resolved_values(loaded)["data"]["system_prompt"] == "use \\${x}"


def test_yaml_keeps_order_types_and_characters() -> None:
    values = {"b": "1", "a": [True, None, 1e-05], "c": "ü\n"}
    text = to_yaml(values)
    assert text.startswith("b: '1'\na:\n")
    assert "ü" in text
    assert yaml.safe_load(text) == values
