"""The pytest plugin of chatlearn-core, loaded through the entry point ``pytest11``."""

from __future__ import annotations
