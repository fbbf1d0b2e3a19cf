"""The arithmetic of heads; the exchange itself is tested over real ranks in chatlearn_fsdp/tests/test_parity.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.ulysses import check_heads, key_heads_of_ranks


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "expected"),
    [
        (4, 4, 2, [0, 1, 2, 3]),
        (8, 2, 2, [0, 1]),
        (4, 2, 4, [0, 0, 1, 1]),  # more ranks than key-value heads
        (4, 1, 2, [0, 0]),
        (6, 2, 3, [0, 0, 0, 1, 1, 1]),  # the middle rank needs both, so each query head brings its own
    ],
)
def test_known_cases(heads, key_heads, size, expected) -> None:
    assert key_heads_of_ranks(heads, key_heads, size) == expected


@given(key_heads=st.integers(1, 6), groups=st.integers(1, 6), data=st.data())
def test_every_query_head_meets_its_own_key_head(key_heads, groups, data) -> None:
    heads = key_heads * groups
    size = data.draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    index = key_heads_of_ranks(heads, key_heads, size)
    assert len(index) % size == 0
    per_rank, kept = heads // size, len(index) // size
    # What grouped attention does on rank j: its query head i meets the kept head i // (per_rank / kept).
    assert per_rank % kept == 0
    met = [index[j * kept + i // (per_rank // kept)] for j in range(size) for i in range(per_rank)]
    assert met == [head // groups for head in range(heads)]


def test_heads_that_cannot_be_shared_are_refused() -> None:
    check_heads(6, 3)
    with pytest.raises(ModelError, match="6 query heads over 4 ranks"):
        check_heads(6, 4)
