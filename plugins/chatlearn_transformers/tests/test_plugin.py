from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from pydantic import ValidationError

from chatlearn_transformers.options import TransformersGeneratorOptions
from chatlearn_transformers.plugin import chatlearn_generators


def test_the_record_names_what_exists():
    (record,) = chatlearn_generators()
    assert record.name == "transformers"
    for target in (record.factory, record.options):
        module, attribute = target.split(":")
        assert hasattr(importlib.import_module(module), attribute)


def test_listing_and_options_import_nothing_heavy():
    code = (
        "import sys, chatlearn_transformers.plugin as p, chatlearn_transformers.options\n"
        "list(p.chatlearn_generators())\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("wrong", [{"max_num_sequences": 0}, {"dtype": "int8"}, {"max_num_seqs": 4}])
def test_wrong_options_are_errors(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        TransformersGeneratorOptions(**wrong)
