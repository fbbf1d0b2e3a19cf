"""Settings for ``chatlearn plugins check chatlearn-async``; runs never import this module."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {"rollout_mode/recorded": {"directory_option": "directory"}}
