"""Size and checksum of files a rank wrote, recorded while writing so that no other process reads terabytes again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class FileFacts:
    """Size and checksum of a file as it was written.

    Example:
        ``FileFacts(num_bytes=4, sha256="9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")``
    """

    num_bytes: int
    sha256: str
    """64 hexadecimal digits."""
