"""The option ``sync_dtype`` of generators; light enough for modules of options."""

from __future__ import annotations

from typing import Literal

SyncDtype = Literal["auto", "exact", "convert"]

SYNC_DTYPE_HELP = (
    "Dtypes that a sync may offer. auto: the engine's, and float32 for bfloat16 (mixed precision holds weights in"
    " float32 and computes with them in bfloat16); exact: the engine's only; convert: any. They are cast to the"
    " engine's."
)
