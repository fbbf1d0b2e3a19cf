from __future__ import annotations

import pytest

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types import FileFacts
from chatlearn_runtime_kit.saved_files import merged_facts

ONE, OTHER = FileFacts(4, "a" * 64), FileFacts(4, "b" * 64)


def test_facts_of_ranks_are_merged_and_may_be_told_twice() -> None:
    assert merged_facts([{"all": ONE, "0": ONE}, {}, {"all": ONE, "2": OTHER}], "role 'policy'") == {
        "all": ONE,
        "0": ONE,
        "2": OTHER,
    }


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{}, None], "role 'policy': save\\(\\) on rank 1 returned a NoneType; it must return the facts"),
        ([{"w": ONE}, {"w": OTHER}], "says two things of w: .*, and on rank 1 .*Did two ranks write one file"),
        ([{"w": FileFacts(4, "not a checksum")}], "save\\(\\) on rank 0 returned 'w'"),
        ([{4: ONE}], "save\\(\\) on rank 0 returned 4"),
    ],
)
def test_what_is_no_facts_is_the_plugins_fault(parts: list[object], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        merged_facts(parts, "role 'policy'")
