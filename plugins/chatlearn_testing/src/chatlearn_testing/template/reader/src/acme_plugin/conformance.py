"""Settings with which the conformance suite tests this package; a run never imports this module."""

from __future__ import annotations

from typing import Any

from chatlearn_testing.suites import ReaderCase

SETTINGS: dict[str, dict[str, Any]] = {
    "dataset/acme": {
        "cases": (
            ReaderCase(
                "prompt\tanswer\n2+2?\t4\r\nWhat is 漢?\t\n".encode(),
                ({"prompt": "2+2?", "answer": "4"}, {"prompt": "What is 漢?", "answer": ""}),
            ),
            ReaderCase(b"\xef\xbb\xbfa\tb\n1\n\n\xff\t2\n3\t4", (None, None, {"a": "3", "b": "4"})),
            ReaderCase(b"a\n1\n2\n", ({"a": "1"}, {"a": "2"})),
            ReaderCase(b"a\ta\n1\t2\n", None),
            ReaderCase(b"\xff\n1\n", None),
        ),
    },
}
