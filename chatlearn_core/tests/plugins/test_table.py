from __future__ import annotations

from chatlearn_core.plugins.table import table


def test_a_table_aligns_all_but_the_last_column() -> None:
    assert (
        table(("A", "B", ""), [("long", "x", "free text"), ("s", "yy", "")]) == "A     B\nlong  x   free text\ns     yy"
    )
