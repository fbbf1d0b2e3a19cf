"""The table in ``docs/models.md`` leaves no causal model type of the installed transformers out, and none is wrong."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
LINE = re.compile(
    r"^\| (?P<name>[^|]+?) \| (?P<cells>(?:packed|padded|refused|right|wrong|–)(?: \| \S+){4}) \|", re.MULTILINE
)
TRAINED = {"packed", "padded"}


def lines() -> dict[str, list[str]]:
    """The trainer's cells (varlen, sdpa, eager, padded) and the generator's, by model type."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return {match["name"]: match["cells"].split(" | ") for match in LINE.finditer(text)}


def test_every_causal_type_has_a_line_and_none_is_wrong() -> None:
    table = lines()
    missing = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - table.keys()
    assert not missing, "run `make test-models`, which writes the table"
    assert not [name for name, cells in table.items() if "wrong" in cells]


def test_families_that_users_train_are_trained_by_default() -> None:
    table = lines()
    packed = [
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "mistral",
        "gemma2",
        "gemma3_text",
        "granite",
        "cohere2",
        "gpt_oss",
        "deepseek_v3",
        "phi3",
        "gpt2",
    ]
    padded = [
        "qwen3_next",
        "qwen3_5_text",
        "mamba",
        "mamba2",
        "lfm2",
        "jamba",
        "bamba",
        "falcon_h1",
        "bloom",
        "mpt",
        "phimoe",
        "deepseek_v32",
    ]
    assert [name for name in packed if table[name][0] != "packed"] == []
    assert [name for name in padded if table[name][0] not in TRAINED] == []


def test_the_table_says_what_it_was_made_with() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert f"Made with transformers {importlib.metadata.version('transformers')}, torch " in text
