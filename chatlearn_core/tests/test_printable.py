from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.printable import printable


def test_what_a_terminal_obeys_is_shown_instead():
    assert printable("\x1b[31mred\x1b[0m\x07") == "\\x1b[31mred\\x1b[0m\\x07"
    assert printable("\x9b2J \r over \x7f") == "\\x9b2J \\x0d over \\x7f"
    assert printable("\u202etxt.exe") == "\\u202etxt.exe"
    assert printable("half \ud800 a pair") == "half \\ud800 a pair"


def test_text_stays_as_it_is():
    text = "tab\tline\nπ ≤ 4, 你好, שלום, 🙂"
    assert printable(text) == text


@given(st.text(st.characters(codec=None)))
def test_the_result_can_be_written_and_stays(text):
    shown = printable(text)
    shown.encode()
    assert printable(shown) == shown
    assert not any(character < " " and character not in "\n\t" for character in shown)
