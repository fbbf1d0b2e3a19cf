"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the runtime."""

from __future__ import annotations

from chatlearn_workers.options import WorkersOptions
from pydantic import Field


class AcmeOptions(WorkersOptions):
    """Options under ``runtime.options``: those of all runtimes over worker processes, and its own."""

    store_directory: str | None = Field(
        None, description="Where tokens and tensors lie that several processes read; if null, the temporary directory."
    )
