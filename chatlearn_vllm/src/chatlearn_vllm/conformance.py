"""Settings for ``chatlearn plugins check chatlearn-vllm``; runs never import this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatlearn_hf.tiny import build_tiny_classifier, build_tiny_model
from chatlearn_testing.suites import ClassifierCase
from chatlearn_vllm.engine_side.engine import DEFAULT_ENVIRONMENT, REQUIRED_ENVIRONMENT

ENGINE_ARGUMENTS: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 64}
"""A small cache is enough for tiny models."""
_VARIABLES = (
    REQUIRED_ENVIRONMENT.keys()
    | DEFAULT_ENVIRONMENT.keys()
    | {
        "AITER_SITUV2_A4W4",
        "LOCAL_WORLD_SIZE",
        "NUMEXPR_MAX_THREADS",
        "RAY_CLIENT_MODE",
        "TILELANG_CLEANUP_TEMP_FILES",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
        "TRITON_CACHE_AUTOTUNING",
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
        "VLLM_DIST_IDENT",
        "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
        "VLLM_SSM_CONV_STATE_LAYOUT",
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    }
)
ENGINE_STATE = frozenset(
    {"the search path of modules (sys.path)"} | {f"the environment: {name}" for name in _VARIABLES}
)


def build_model(directory: Path) -> Path:
    """Build a tiny model whose attention head width suits vLLM's CPU kernels (a multiple of 32)."""
    return build_tiny_model(directory, hidden=128)


def build_classifier(directory: Path) -> Path:
    """Build a tiny sequence classifier of that form."""
    return build_tiny_classifier(directory, hidden=128)


CLASSIFIER = ClassifierCase(
    build_model="chatlearn_vllm.conformance:build_classifier",
    load_reference="chatlearn_hf.plain_forward:load_plain_classifier",
    options={"runner": "classify"},
)
SETTINGS: dict[str, dict[str, Any]] = {
    "generator/vllm": {
        "build_model": "chatlearn_vllm.conformance:build_model",
        "load_reference": "chatlearn_hf.plain_forward:load_plain_model",
        "engine_arguments": ENGINE_ARGUMENTS,
        "engine_state": ENGINE_STATE,
        "classifier": CLASSIFIER,
    },
}
