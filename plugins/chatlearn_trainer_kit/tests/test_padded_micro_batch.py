from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chatlearn_trainer_kit.padded_micro_batch import padded_micro_batches, padded_tokens


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    units=st.data(),
    max_tokens=st.integers(1, 200),
    at_least=st.integers(0, 12),
)
def test_padded_cuts_hold_every_unit_once_within_the_budget(lengths, units, max_tokens, at_least) -> None:
    unit_index = units.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    cut = padded_micro_batches(lengths, unit_index, max_tokens, at_least=at_least)
    assert sorted(i for indices in cut for i in indices) == list(range(len(lengths)))
    for indices in cut:
        units_here = {unit_index[i] for i in indices}
        assert sorted(indices) == [i for i, unit in enumerate(unit_index) if unit in units_here]
        assert padded_tokens(lengths, indices) <= max_tokens or len(units_here) == 1
    assert len(cut) >= at_least
    assert all(cut[: min(at_least, len(set(unit_index)))])
    sizes = [padded_tokens(lengths, indices) for indices in cut]
    assert sizes == sorted(sizes, reverse=True)


def test_padded_cuts_bring_similar_lengths_together() -> None:
    lengths = [10, 100, 12, 98, 11, 97]
    assert padded_micro_batches(lengths, range(6), 300) == [[1, 3, 5], [0, 2, 4]]
    assert sum(padded_tokens(lengths, indices) for indices in [[1, 3, 5], [0, 2, 4]]) == 336
