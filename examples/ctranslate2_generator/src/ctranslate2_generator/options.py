"""Options and engine arguments of ``ctranslate2``. Imports pydantic only, so that checking a configuration is fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PASSED = ("device_index", "flash_attention", "tensor_parallel")
"""Arguments of ``ctranslate2.Generator`` that a configuration may set under ``roles.<generator>.engine``."""
OWNED = {
    "model_path": "set model.path",
    "device": "set roles.<generator>.device",
    "compute_type": "set options.compute_type",
    "inter_threads": "set options.num_workers",
    "intra_threads": "set options.threads_per_worker",
    "max_queued_batches": "requests wait in the adapter",
    "files": "the adapter converts the model itself",
}


class CTranslate2Options(BaseModel):
    """Options under ``roles.<generator>.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compute_type: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="Type of weights and arithmetic; auto: float32 on a CPU, bfloat16 on a GPU."
    )
    num_workers: int = Field(4, ge=1, le=256, description="Requests that are sampled at the same time.")
    threads_per_worker: int = Field(1, ge=1, le=256, description="CPU threads of each of them.")


def engine_problems(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Each engine argument that cannot be passed on, with the reason."""
    reasons = {name: f"owned by the adapter; {OWNED[name]}" for name in arguments if name in OWNED}
    unknown = f"not passed to ctranslate2.Generator; {', '.join(PASSED)} are"
    return reasons | {name: unknown for name in arguments if name not in OWNED and name not in PASSED}
