"""The table of hooks and protocol methods is complete and current."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

NAME = "plugin_reference"
if NAME not in sys.modules:
    specification = importlib.util.spec_from_file_location(NAME, Path(__file__).with_name(f"{NAME}.py"))
    assert specification is not None
    assert specification.loader is not None
    sys.modules[NAME] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(sys.modules[NAME])
reference = sys.modules[NAME]


def test_the_page_is_current() -> None:
    written = reference.PAGE.read_text(encoding="utf-8")
    assert written == reference.page(), "run python tests/plugin_reference.py"


def test_every_module_with_protocols_is_in_it() -> None:
    named = {module for modules in reference.PROTOCOLS.values() for module in modules}
    assert named == reference.protocol_modules()


@pytest.mark.parametrize("text", ["", "Called: always.", "Called: when; where; often; more."])
def test_a_docstring_without_the_three_parts_is_an_error(text: str) -> None:
    [function] = reference.ast.parse(f'def hook():\n    """Hook.\n\n    {text}\n    """').body
    with pytest.raises(ValueError, match=r"hook: its docstring has no line 'Called"):
        reference.Called.of("hook", function)
