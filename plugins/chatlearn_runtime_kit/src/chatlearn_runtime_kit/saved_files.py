"""What the ranks of a trainer say of the files that they wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types.file_facts import FileFacts

_SHA256 = re.compile(r"[0-9a-f]{64}")


def merged_facts(parts: Iterable[object], origin: str) -> dict[str, FileFacts]:
    """Merge the facts of all ranks, keyed by the file's path below the checkpoint directory.

    Args:
        parts: return values of each rank's ``save``.
        origin: begins the error message.

    Raises:
        BackendError: a rank returned no facts, or two ranks returned different facts for one file.
    """
    merged: dict[str, FileFacts] = {}
    for rank, part in enumerate(parts):
        if not isinstance(part, Mapping):
            raise BackendError(
                f"{origin}: save() on rank {rank} returned a {type(part).__name__}; it must return the facts of the "
                "files that this rank wrote, {} if it has none. This is a fault of the plugin"
            )
        for name, facts in part.items():
            if not isinstance(name, str) or not isinstance(facts, FileFacts) or not _SHA256.fullmatch(facts.sha256):
                raise BackendError(
                    f"{origin}: save() on rank {rank} returned {name!r:.80}: {facts!r:.120}; it must map the path of "
                    "each file below the directory to its FileFacts. This is a fault of the plugin"
                )
            if merged.setdefault(name, facts) != facts:
                raise BackendError(
                    f"{origin}: save() says two things of {name}: {merged[name]}, and on rank {rank} {facts}. Did two "
                    "ranks write one file? This is a fault of the plugin"
                )
    return merged
