from __future__ import annotations

import subprocess
import sys

from chatlearn_rewards.function_calling import build_function_caller
from chatlearn_rewards.pool_worker import MAX_ERROR_CHARACTERS, describe_exception


def fail(message: str) -> None:
    raise ValueError(message)


def caught(message: str) -> ValueError:
    try:
        fail(message)
    except ValueError as error:
        return error
    raise AssertionError


def test_an_exception_becomes_one_line_with_its_place():
    text = describe_exception(caught("two\nlines"))
    assert text.startswith("ValueError: two lines (")
    assert "test_pool_worker.py" in text
    assert text.endswith("in fail)")
    assert "\n" not in text


def test_what_calls_a_users_function_is_not_shown_with_it(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth):\n    raise KeyError('gold')\n")
    call = build_function_caller(f"{file}:compute_score", "auto", False, str(tmp_path))
    row = {"data_source": "d", "solution_str": "", "ground_truth": None, "extra_info": {}}
    assert call([row]) == [{"error": f"KeyError: 'gold' ({file}:2 in compute_score)"}]


def test_a_long_message_is_shortened():
    text = describe_exception(caught("x" * 100_000))
    assert "x..." in text
    assert text.count("x") <= MAX_ERROR_CHARACTERS
    assert describe_exception(ValueError()) == "ValueError"


def test_a_worker_starts_from_the_standard_library_alone():
    code = (
        "import sys, chatlearn_rewards.pool_worker;"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'chatlearn_core', 'asyncio') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
