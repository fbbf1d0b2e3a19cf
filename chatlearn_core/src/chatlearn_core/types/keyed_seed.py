"""Random seeds keyed by purpose, so that results depend neither on timing nor on how often a run was resumed."""

from __future__ import annotations

import hashlib


def keyed_seed(seed: int, *key: str | int) -> int:
    """A seed in [0, 2**63) that depends only on the run's seed and the key."""
    text = "\x1f".join(str(part) for part in (seed, *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
