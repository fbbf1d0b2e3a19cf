"""Keyed seeds: the same on every machine and in every release, and apart from each other."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_core.types.keyed_seed import keyed_seed


def test_a_seed_is_the_hash_of_what_it_is_for() -> None:
    digest = hashlib.blake2b(b"7\x1fsample\x1fp@3#0", digest_size=8).digest()
    assert keyed_seed(7, "sample", "p@3#0") == int.from_bytes(digest, "big") // 2


def test_a_seed_stays_what_it_was() -> None:
    # Written down when the function was: a change would change every run.
    assert keyed_seed(0, "sample", "p@1#0") == 3205109416249677072


@settings(deadline=None)
@given(st.integers(0, 2**62), st.lists(st.text() | st.integers(), max_size=3))
def test_every_seed_is_one_that_numpy_and_torch_take(seed: int, key: list[str | int]) -> None:
    assert 0 <= keyed_seed(seed, *key) < 2**63


def test_keys_do_not_run_together() -> None:
    keys = [("a", "b"), ("ab",), ("a", "b", ""), (1, 12), (11, 2), ("sample", 1), ("sample", 2)]
    assert len({keyed_seed(0, *key) for key in keys} | {keyed_seed(1, *key) for key in keys}) == 2 * len(keys)
