from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from pydantic import ValidationError

from chatlearn_sglang.options import SGLangGeneratorOptions
from chatlearn_sglang.plugin import chatlearn_generators


def test_the_record_names_what_exists() -> None:
    (record,) = chatlearn_generators()
    assert record.name == "sglang"
    for target in (record.factory, record.options):
        module, attribute = target.split(":")
        assert hasattr(importlib.import_module(module), attribute)


def test_listing_and_options_import_nothing_heavy() -> None:
    code = (
        "import sys, chatlearn_sglang.plugin as p, chatlearn_sglang.options\n"
        "list(p.chatlearn_generators())\n"
        "print(sorted({'torch', 'sglang', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("wrong", [{"bucket_mb": 0}, {"dtype": "int8"}, {"pyton": "x"}])
def test_wrong_options_are_errors(wrong) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        SGLangGeneratorOptions(**wrong)
