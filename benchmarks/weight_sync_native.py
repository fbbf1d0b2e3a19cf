"""An engine alone, taking the weights of a model directory by its own means; run by ``weight_sync.py``.

    python weight_sync_native.py vllm|sglang MODEL DTYPE REPEATS SCRATCH [ENGINE_SIDE]

It runs in the engine's interpreter and needs nothing of ChatLearn; without a GPU, SGLang needs the stand-ins in the
folder ENGINE_SIDE. ``tensors``: new tensors in the memory of the process that holds the engine, through vLLM's
``reload_weights(weights_iterator)`` (layerwise reload) or SGLang's ``update_weights_from_tensor``, which moves them
into its scheduler's process. ``checkpoint``: the same tensors written to a safetensors file, and read by the engine.
Prints one JSON line: seconds of every run. vLLM's own transports between processes, NCCL and CUDA IPC, need GPUs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL_LENGTH = 512
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

if len(sys.argv) > 6 and sys.argv[1] == "sglang":
    # At module level: the engine's processes import this file, too, before they import SGLang.
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1"}
    spec = importlib.util.spec_from_file_location("cpu_stand_ins", Path(sys.argv[6]) / "cpu_stand_ins.py")
    assert spec is not None
    assert spec.loader is not None
    stand_ins = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_ins)
    stand_ins.install()

Tensors = dict[str, Any]
Take = Callable[[Tensors], None]


def vllm_engine(model: str, dtype: str) -> tuple[Take, Callable[[str], None]]:
    """How vLLM takes tensors, and a directory."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0"}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM

    llm = LLM(
        model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=MODEL_LENGTH,
        max_num_seqs=8,
        kv_cache_memory_bytes=256 << 20,
    )

    def take(tensors: Tensors) -> None:
        # Without the tied head under its own name, vLLM keeps the packed head it had.
        named = [*tensors.items(), (HEAD, tensors[EMBEDDING])]
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named)})
        llm.reset_prefix_cache()

    def read(directory: str) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})
        llm.reset_prefix_cache()

    return take, read


def sglang_engine(model: str, dtype: str) -> tuple[Take, Callable[[str], None]]:
    """How SGLang takes tensors, and a directory."""
    import sglang

    engine = sglang.Engine(
        model_path=model,
        dtype=dtype,
        device="cpu",
        context_length=MODEL_LENGTH,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        mem_fraction_static=0.1,
        max_total_tokens=MODEL_LENGTH * 4,
        max_running_requests=4,
        skip_server_warmup=True,
        sleep_on_idle=True,
        log_level="error",
    )

    def take(tensors: Tensors) -> None:
        for reply in (
            engine.begin_weight_update(),
            engine.update_weights_from_tensor(list(tensors.items())),
            engine.end_weight_update(),
        ):
            assert reply[0], reply

    def read(directory: str) -> None:
        reply = engine.update_weights_from_disk(directory)
        assert reply[0], reply

    return take, read


def main() -> None:
    engine, model, dtype, repeats, scratch = sys.argv[1:6]
    import torch
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(1)
    take, read = {"vllm": vllm_engine, "sglang": sglang_engine}[engine](model, dtype)
    held = {name: tensor.clone() for name, tensor in load_file(Path(model) / "model.safetensors").items()}
    directory = Path(scratch)
    directory.mkdir(parents=True)
    for file in Path(model).iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, directory)
    seconds: dict[str, list[float]] = {"tensors": [], "checkpoint": []}
    for _ in range(int(repeats) + 1):
        # SGLang moves the tensors it is given into shared memory for good: each time new ones.
        fresh = {name: tensor.clone() for name, tensor in held.items()}
        start = time.perf_counter()
        take(fresh)
        seconds["tensors"].append(time.perf_counter() - start)
        del fresh
    for _ in range(int(repeats) + 1):
        start = time.perf_counter()
        save_file(held, directory / "model.safetensors", {"format": "pt"})
        read(str(directory))
        seconds["checkpoint"].append(time.perf_counter() - start)
    print(json.dumps(seconds), flush=True)
    os._exit(0)  # what the engine leaves running is in this process group, which the caller ends


if __name__ == "__main__":
    main()
