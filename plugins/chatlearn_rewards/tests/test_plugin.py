from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from chatlearn_rewards.plugin import chatlearn_rewards

RECORDS = {record.name: record for record in chatlearn_rewards()}


def test_names():
    rules = {"multiple_choice", "exact_match", "fuzzy_match", "json_schema", "length", "repetition"}
    assert set(RECORDS) == {"math", "gsm8k", "format", "function", "code", "judge", "http", "process", "model"} | rules
    assert all(record.summary for record in RECORDS.values())
    assert {name for name, record in RECORDS.items() if record.unit == "group"} == {"model", "process"}


@pytest.mark.parametrize("name", sorted(RECORDS))
@pytest.mark.parametrize("attribute", ["factory", "options"])
def test_import_strings_lead_somewhere(name, attribute):
    module, _, attribute_name = getattr(RECORDS[name], attribute).partition(":")
    assert callable(getattr(import_module(module), attribute_name))


def test_listing_imports_nothing_heavy():
    code = (
        "import sys, chatlearn_rewards.plugin, chatlearn_rewards.options, chatlearn_rewards.rule_options;"
        "print([m for m in ('torch', 'sympy', 'math_verify', 'numpy', 'jsonschema') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
