from __future__ import annotations

from pathlib import Path

from chatlearn_testing.suites import ReaderConformance

from acme_plugin.conformance import SETTINGS
from acme_plugin.options import AcmeOptions
from acme_plugin.reader import AcmeReader


class TestConformance(ReaderConformance):
    backend = "acme"
    cases = SETTINGS["dataset/acme"]["cases"]


def test_an_error_tells_the_line_and_both_numbers(tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    file.write_text("a\tb\n1\t2\t3\n")
    [row] = AcmeReader(AcmeOptions()).rows(str(file), None)
    assert (row.place, row.error) == (f"{file} line 2", "has 3 values for 2 columns")
