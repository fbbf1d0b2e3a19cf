from __future__ import annotations

import ast
import importlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pydantic import ValidationError

from chatlearn_core.plugins.compatibility import bases_of
from chatlearn_vllm import engine_side
from chatlearn_vllm.engine_arguments import num_workers
from chatlearn_vllm.engine_side.versions import SUPPORTED, check_version
from chatlearn_vllm.options import VLLMGeneratorOptions
from chatlearn_vllm.plugin import chatlearn_generators


def test_the_record_names_what_exists():
    (record,) = chatlearn_generators()
    assert record.name == "vllm"
    for target in (record.factory, record.options):
        module, attribute = target.split(":")
        assert hasattr(importlib.import_module(module), attribute)


def test_the_record_counts_the_devices_of_an_engine_as_the_backend_does():
    (record,) = chatlearn_generators()
    sizes = dict(zip((name for (name,) in record.device_arguments), (2, 3, 5, 7), strict=False))
    assert num_workers(sizes) == math.prod(sizes.values()) == 30


@pytest.mark.slow
def test_listing_options_and_adapter_do_not_import_the_engine():
    code = (
        "import sys, chatlearn_vllm.plugin as p, chatlearn_vllm.options\n"
        "list(p.chatlearn_generators())\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'vllm'} & set(sys.modules)))\n"
        "import chatlearn_vllm.generator\n"
        "print('vllm' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split("\n")[:2] == ["[]", "False"]


@pytest.mark.parametrize("wrong", [{"host": "server"}, {"sleep_level": 3}, {"lora": {"max_rank": 0}}, {"max_seqs": 4}])
def test_wrong_options_are_errors(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        VLLMGeneratorOptions(**wrong)


def test_the_requirement_is_what_the_engine_side_supports():
    (record,) = chatlearn_generators()
    for text in record.requires[0]:
        for line in SUPPORTED:
            assert Requirement(text).specifier.contains(f"{line}.0")
        newest = max(tuple(map(int, line.split("."))) for line in SUPPORTED)
        assert not Requirement(text).specifier.contains(f"{newest[0]}.{newest[1] + 1}.0")


def test_a_version_that_was_not_tested_is_refused():
    check_version("0.32.1")
    check_version("0.32.0+cpu")
    with pytest.raises(RuntimeError, match=r"vLLM 0\.33\.0 is installed, but chatlearn-vllm supports 0\.32"):
        check_version("0.33.0")
    with pytest.raises(RuntimeError, match=r"vLLM 0\.3\.2"):
        check_version("0.3.2")


def test_the_engine_side_imports_nothing_else_of_chatlearn():
    """The interpreter that ``python`` names has no distribution of this repository."""
    imported = set()
    for file in Path(engine_side.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(str(node.module))
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
    outside = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    ours = {name for name in outside if name.startswith("chatlearn")}
    assert all(name.startswith("chatlearn_hosting.engine_side.") for name in ours), ours
    assert {name.partition(".")[0] for name in outside - ours} == {"numpy", "safetensors", "torch", "vllm"}


@pytest.mark.parametrize("logprobs", ["raw", "processed"])
def test_the_basis_of_logprobs_is_an_option(logprobs):
    """What a run holds every completion to, and compares with the trainer's."""
    [record] = chatlearn_generators()
    assert bases_of(record, VLLMGeneratorOptions(logprobs=logprobs)) == {logprobs}
