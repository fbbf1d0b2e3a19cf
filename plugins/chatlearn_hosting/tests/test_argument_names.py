from __future__ import annotations

import pytest

from chatlearn_hosting.engine_side.argument_names import UnknownArgumentsError, check_names


def test_unknown_names_are_all_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(UnknownArgumentsError) as caught:
        check_names(["tp_size", "max_running_request", "zzz"], ["tp_size", "max_running_requests"])
    assert str(caught.value).splitlines() == [
        "max_running_request: unknown; did you mean 'max_running_requests'?",
        "zzz: unknown",
    ]


def test_known_names_pass() -> None:
    check_names(["tp_size"], ["tp_size"])
