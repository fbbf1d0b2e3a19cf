"""Chat templates as their models' authors published them, from the files of the package ``trl``."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def published_template(name: str) -> str:
    """Return the text of a template.

    The package is not imported; only its files are read.

    Args:
        name: of a file in ``trl/chat_templates``, without its ending: ``qwen3``, ``gptoss``.

    Raises:
        ModuleNotFoundError: the package is not installed.
        FileNotFoundError: it has no such template.
    """
    package = importlib.util.find_spec("trl")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("published chat templates are files of the package trl: pip install trl", name="trl")
    return (Path(package.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
