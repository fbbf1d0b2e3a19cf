"""Choosing a dataset format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chatlearn_core.data.selection import detect_format, row_readers, select_format
from chatlearn_core.exceptions import ConfigError, DataError, PluginError, PluginNotFoundError

WHERE = "data.train[0]"


@pytest.fixture
def formats(make_registry: Callable[..., Any]) -> Any:
    return make_registry(
        ("plain", {"columns": frozenset({"prompt"})}),
        ("judged", {"columns": frozenset({"prompt", "verdict"})}),
        ("ranked", {"columns": frozenset({"prompt", "rank"})}),
        ("named", {}),
        ("broken", {"factory": "Missing"}),
        ("doubling", {"factory": "DoublingReader", "reads": frozenset({".rows", ".row"})}),
    )


def test_auto_takes_the_most_specific_format_that_fits(formats: Any) -> None:
    assert detect_format(formats, {"prompt": "", "other": ""}, WHERE) == "plain"
    assert detect_format(formats, {"prompt": "", "verdict": ""}, WHERE) == "judged"


def test_auto_refuses_a_tie_and_names_both(formats: Any) -> None:
    with pytest.raises(DataError, match=r"(?s)judged and ranked equally well.*data.train\[0\].format"):
        detect_format(formats, {"prompt": "", "verdict": "", "rank": 1}, WHERE)


def test_auto_without_a_fit_names_columns_and_formats(formats: Any) -> None:
    with pytest.raises(DataError, match=r"(?s)\['text'\].*judged: prompt, verdict.*'keys'"):
        detect_format(formats, {"text": ""}, WHERE)


def test_unknown_name_lists_what_is_installed(formats: Any) -> None:
    with pytest.raises(PluginNotFoundError, match=r"(?s)plian.*data.train\[0\].format.*plain, ranked \(plain 1.0\)"):
        select_format(formats, "plian", {}, WHERE)


def test_a_reader_is_no_format(formats: Any) -> None:
    with pytest.raises(ConfigError, match=r"reads files \(\.row, \.rows\)"):
        select_format(formats, "doubling", {}, WHERE)


def test_options_are_checked_with_key_and_value(formats: Any) -> None:
    assert select_format(formats, "plain", {"answer": "optional"}, WHERE).answer_required is False
    with pytest.raises(ConfigError, match=r"(?s)data.train\[0\].options.anwser: .*is 'optional'.*It takes: answer"):
        select_format(formats, "plain", {"anwser": "optional"}, WHERE)


def test_a_plugin_that_does_not_import_is_named_with_its_distribution(formats: Any) -> None:
    with pytest.raises(PluginError, match=r"(?s)'broken' \(plain 1.0\).*Missing"):
        select_format(formats, "broken", {}, WHERE)


def test_readers_are_found_by_suffix(formats: Any) -> None:
    assert sorted(row_readers(formats)) == [".row", ".rows"]
