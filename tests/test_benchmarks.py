"""Every benchmark runs alone and prints one JSON line last. This test does not judge the measured values."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TRL_PYTHON = BENCHMARKS / ".venv-trl" / "bin" / "python"
TIMEOUT_S = 800.0
"""A quick run takes a minute at most where nothing else runs."""
MACHINE_FACTS = {"cpu", "cores", "memory_gib", "platform", "python", "torch", "load_1min"}


def run_benchmark(name: str, *arguments: str) -> dict[str, Any]:
    """The JSON line that the program prints last."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1], parse_constant=refuse_constant)
    assert result["benchmark"] == name
    assert isinstance(result["met"], bool)
    assert set(result["machine"]) == MACHINE_FACTS
    return result


def refuse_constant(text: str) -> float:
    raise AssertionError(f"{text} is no JSON")


@pytest.mark.slow
def test_plugin_listing() -> None:
    result = run_benchmark("plugin_listing", "--repeats", "1")
    assert result["heavy_imported"] == []


@pytest.mark.slow
def test_reward_throughput() -> None:
    result = run_benchmark(
        "reward_throughput", "--samples", "6", "--starts", "2", "--workers", "1", "2", "--repeats", "1"
    )
    assert result["samples_per_s"].keys() == {"math", "code"}
    assert all(rates.keys() == {"1", "2"} for rates in result["samples_per_s"].values())
    assert min(spread["lowest"] for spread in result["start_s"].values()) > 0.0


@pytest.mark.thorough
def test_gateway() -> None:
    result = run_benchmark("gateway", "--quick")
    assert [row["sessions"] for row in result["rows"]] == [1, 4]
    assert all(row["generator_ms"]["median"] >= 50.0 for row in result["rows"])
    assert result["memory"]["tokens"] > 2 * 64, "two turns of 64 tokens, and prompts"
    assert result["memory"]["bytes"] > 8 * result["memory"]["tokens"]


@pytest.mark.slow
@pytest.mark.engine
def test_prompt_path() -> None:
    """The table of the architecture document has the files that hand the prompt on."""
    result = run_benchmark("prompt_path")
    document = (BENCHMARKS.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = document.partition("### A prompt's way\n")[2].partition("The four parts are")[0]
    assert sorted(re.findall(r"^\| `(\S+\.py)` \|", section, re.MULTILINE)) == sorted(result["path"])
    assert result["met"], f"{result['files_on_path']} files hand a prompt on; the aim is {result['aim']}"
    assert {"chatlearn_core/runtime/boundary.py", "chatlearn_rewards/gsm8k_reward.py"} <= set(result["readers"])


@pytest.mark.thorough
@pytest.mark.engine
def test_weight_sync() -> None:
    result = run_benchmark("weight_sync", "--quick", "--engines", "transformers", "vllm")
    [row] = result["rows"]
    assert row["transfer"].keys() == {"direct", "shared_memory", "broadcast", "delta", "checkpoint"}
    assert 0.0 < row["delta"]["changed_share"] < row["delta"]["payload_share"] < 1.0
    assert row["engine"].keys() == {"transformers", "vllm"}
    for engine in row["engine"].values():
        assert engine["from_memory_s"] > 0.0
        assert engine["transports"].keys() == row["transfer"].keys()
    native = row["engine"]["vllm"]["native_s"]
    over = row["engine"]["vllm"]["transports"]["shared_memory"]["over_native"]
    assert native.keys() == over.keys() == {"tensors", "checkpoint"}


@pytest.mark.slow
@pytest.mark.engine
def test_step_overhead() -> None:
    result = run_benchmark("step_overhead", "--quick")
    [measured] = result["workloads"].values()
    parts = measured["median_s"]
    assert result["step_over_inside"] == measured["ratio"]
    low, high = measured["ratio_range"]
    assert 1.0 <= low <= measured["ratio"] <= high, "what is inside a step cannot be more than the step"
    assert min(parts[name] for name in ("generate", "forward", "backward", "optimizer")) > 0.0
    assert measured["workload"]["parameters"] > 0


@pytest.mark.slow
@pytest.mark.engine
def test_episode_overhead() -> None:
    result = run_benchmark("episode_overhead", "--quick")
    [measured] = result["conversations"].values()
    low, high = measured["over_engine_range"]
    assert result["over_engine"] == measured["over_engine"]
    assert 1.0 <= low <= measured["over_engine"] <= high
    assert measured["compute_s"] < measured["engine_s"] < measured["rollouts_s"]


@pytest.mark.grid
@pytest.mark.engine
def test_recovery() -> None:
    result = run_benchmark("recovery", "--quick", "--rounds", "1")
    assert set(result["faults"]) == {"replica", "reward worker", "trainer rank", "node", "driver"}
    assert all(fault["recovery_s"] > 0 for fault in result["faults"].values())
    assert result["met"]


@pytest.mark.slow
@pytest.mark.engine
def test_packing() -> None:
    result = run_benchmark("packing", "--quick")
    ways = result["ways"]
    assert ways["packed"]["real_share"] == result["real_share"] == 1.0, "packed rows hold no padding"
    assert ways["padded"]["real_share"] <= ways["padded_sorted"]["real_share"] < 1.0
    for way in ways.values():
        assert math.isclose(way["gradient_norm"], ways["packed"]["gradient_norm"], rel_tol=1e-3)
    assert 0.0 < result["attention_real_share"] <= 1.0


@pytest.mark.thorough
def test_loss_memory() -> None:
    """The program itself refuses ways that differ in loss or gradients."""
    result = run_benchmark("loss_memory", "--quick")
    [row] = result["rows"]
    assert row["ways"].keys() == {"chatlearn", "naive", "trl", "trl_logits"}
    measured = {name: way for name, way in row["ways"].items() if "left_out" not in way}
    assert {"chatlearn", "naive"} <= measured.keys()
    assert all(way["seconds"] > 0.0 for way in measured.values())
    assert all(advantage["chatlearn_s"] > 0.0 for advantage in result["advantages"])


@pytest.mark.slow
@pytest.mark.engine
def test_trainer_steps() -> None:
    result = run_benchmark("trainer_steps", "--quick")
    assert result["ways"].keys() == {"packed", "unpacked", "plain"}
    for way in result["ways"].values():
        assert way["tokens_per_s"] > 0
        assert math.isclose(way["grad_norm"], result["ways"]["plain"]["grad_norm"], rel_tol=1e-3)


@pytest.mark.thorough
@pytest.mark.engine
def test_trainer_layouts() -> None:
    result = run_benchmark("trainer_layouts", "--quick")
    ways = result["ways"]
    assert ways.keys() == {"plain transformers", "fsdp, 1 rank", "megatron, PP 2", "deepspeed, ZeRO-3"}
    for way in ways.values():
        assert way["tokens_per_s"] > 0
        assert math.isclose(way["grad_norm"], ways["plain transformers"]["grad_norm"], rel_tol=1e-3)
        assert way["matmul_share"] > 0
        assert way["mfu"] is None or 0 < way["mfu"] < 1, "there is a figure on a GPU whose peak is known"
    assert all(0.0 <= way["outside_share"] < 1.0 for name, way in ways.items() if name != "plain transformers")


@pytest.mark.thorough
@pytest.mark.engine
def test_weight_export() -> None:
    result = run_benchmark("weight_export", "--quick")
    assert result["ways"].keys() == {
        "megatron, PP 2, full_tensors", "megatron, PP 2, boxes", "deepspeed, ZeRO-3, full_tensors"
    }  # fmt: skip
    assert all(0.5 <= way["sent_share"] <= 1.0 for way in result["ways"].values())


@pytest.mark.thorough
@pytest.mark.engine
def test_driver_scaling() -> None:
    result = run_benchmark("driver_scaling", "--samples", "64", "512", "--replicas", "1", "8")
    assert [(row["samples"], row["replicas"]) for row in result["rows"]] == [(64, 1), (512, 1), (64, 8), (512, 8)]
    assert all(row["driver_s"] > 0.0 for row in result["rows"])
    assert result["object_store"]["put_gb_s"] > 0.0


@pytest.mark.thorough
@pytest.mark.engine
def test_async_training() -> None:
    result = run_benchmark("async_training", "--quick")
    [results] = result["simulated"].values()
    assert results["sync"]["staleness_mean"] == 0.0
    assert results["one_step_off"]["staleness_mean"] == 1.0
    assert 1.0 < results["async 2"]["staleness_mean"] <= 2.0
    real = result["real"]
    assert [real[mode]["staleness_mean"] for mode in ("sync", "one_step_off")] == [0.0, 1.0]
    assert real["async 2"]["tokens_mean"] == real["sync"]["tokens_mean"], "the same lengths"
    for measured in (*results.values(), *real.values()):
        assert measured["samples_a_s"] > 0.0
        assert measured["dropped_stale"] == 0.0
        assert 0.0 <= measured["trainer_idle"] <= 1.0


@pytest.mark.slow
@pytest.mark.engine
def test_long_tail() -> None:
    result = run_benchmark("long_tail", "--quick")
    for results in (*result["simulated"].values(), result["real"]):
        for measured in results.values():
            assert measured["step_s"] > 0.0
            assert measured["prompts_a_step"] > 0.0
            assert 0.0 <= measured["replica_idle"] <= 1.0
        assert results["manager"]["staleness_mean"] == 0.0
    for results in result["simulated"].values():  # what the real one keeps depends on the machine
        assert results.get("keep", {"staleness_mean": 1.0})["staleness_mean"] > 0.0
    assert set(result["prompts_a_s_over_whole_steps"]) == {"resume", "keep"}


@pytest.mark.slow
@pytest.mark.skipif(not TRL_PYTHON.exists(), reason="TRL is not installed; `python benchmarks/against_trl.py` does it")
def test_against_trl() -> None:
    result = run_benchmark("against_trl", "--quick")
    assert {"chatlearn", result["best_trl"]} <= set(result["settings"])
    low, high = result["range"]
    assert low <= result["samples_per_s_over_trl"] <= high
    for setting in result["settings"].values():
        assert setting["samples_per_s"] > 0.0
        assert setting["peak_rss_mib"] > 0.0


@pytest.mark.parametrize("file", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda file: file.stem)
def test_recorded_results_name_the_machine_and_no_place_on_it(file: Path) -> None:
    result = json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    name = result["benchmark"]
    assert file.stem == name or file.stem.startswith(f"{name}_"), "of another workload or machine"
    assert set(result["machine"]) == MACHINE_FACTS
    assert not result.get("quick", False), "a quick run measures nothing"
    texts = [value for value in strings(result) if "/" in value]
    assert not [text for text in texts if text.startswith("/") or "://" in text]


def strings(value: Any) -> list[str]:
    """Every string inside a JSON value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return []


@pytest.mark.thorough
@pytest.mark.engine
def test_generator_throughput() -> None:
    result = run_benchmark("generator_throughput", "--quick")
    [measured] = result["results"]
    assert measured["process"]["ratio"] == result["ratio"] > 0
    assert measured["process"]["cpu_ratio"] > 0
    assert measured["bare_tokens_per_s"] > 0
