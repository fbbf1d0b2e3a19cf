"""JSON values and arrays on disk: everything comes back, and what cannot be stored is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.executor.array_state import read_array_state, write_array_state


def test_values_and_arrays_come_back(tmp_path: Path) -> None:
    mask, scalar = np.array([True, False]), np.float32(0.1)
    state = {"a": [1, None, "é", {"mask": mask}], "b": {"empty": np.zeros((0, 3), np.int16)}, "c": scalar, "d": (1, 2)}
    write_array_state(tmp_path / "state.json", state)
    read = read_array_state(tmp_path / "state.json")
    assert read["a"][:3] == [1, None, "é"]
    assert (read["a"][3]["mask"].dtype, read["a"][3]["mask"].tolist()) == (mask.dtype, mask.tolist())
    assert (read["b"]["empty"].shape, read["b"]["empty"].dtype) == ((0, 3), np.int16)
    assert (read["c"], read["d"]) == (float(scalar), [1, 2])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([object()]), r"state\.json\.groups\[1\] is an array of object; checkpoints hold numbers"),
        ({1, 2}, r"state\.json\.groups\[1\] is a set; checkpoints hold JSON values and arrays only"),
        ({"$array": "x"}, r"state\.json\.groups\[1\] has the key '\$array'"),
    ],
)
def test_what_cannot_be_stored_is_named(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_array_state(tmp_path / "state.json", {"groups": [0, value]})
