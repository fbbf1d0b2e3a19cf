from __future__ import annotations

import re

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols.lifecycle import ModelSource, RoleContext
from chatlearn_vllm.generator import VLLMGenerator
from chatlearn_vllm.options import VLLMGeneratorOptions
from chatlearn_vllm.visible_devices import visible_devices


@pytest.mark.parametrize(
    ("device", "num_workers", "inherited", "expected"),
    [
        ("cpu", 2, "0,1", None),
        ("cuda", 2, "0,1", None),
        ("cuda:0", 1, None, "0"),
        ("cuda:2", 1, None, "2"),
        ("cuda:2", 4, None, "2,3,4,5"),
        ("cuda:0", 2, "4,5,6,7", "4,5"),
        ("cuda:2", 2, "4,5,6,7", "6,7"),
        ("cuda:1", 1, "GPU-aa, GPU-bb", "GPU-bb"),
    ],
)
def test_an_engine_sees_a_gpu_for_each_of_its_workers(device, num_workers, inherited, expected):
    assert visible_devices(device, num_workers, inherited) == expected


@pytest.mark.parametrize(
    ("device", "num_workers", "inherited", "message"),
    [
        ("cuda:1", 2, "4,5", "GPUs 1 to 2 are needed, but CUDA_VISIBLE_DEVICES='4,5' shows only 2"),
        ("cuda:0", 1, "", "GPU 0 is needed, but CUDA_VISIBLE_DEVICES='' shows only 0"),
    ],
)
def test_missing_gpus_are_counted_in_the_error(device, num_workers, inherited, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        visible_devices(device, num_workers, inherited)


def make_host(monkeypatch, device, engine, **options):
    """The host that a generator would start, and what it would be started with."""
    monkeypatch.setattr("chatlearn_vllm.generator.ChildHost", lambda name, timeout_s, **rest: rest)
    context = RoleContext("actor", ModelSource("m", "m"), device=device, engine_arguments=engine)
    return VLLMGenerator(VLLMGeneratorOptions(**options), context)._make_host()


@pytest.mark.parametrize("options", [{"host": "child"}, {"python": "other-python"}], ids=str)
def test_the_child_of_a_parallel_engine_sees_all_its_gpus(monkeypatch, options):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    engine = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    started = make_host(monkeypatch, "cuda:1", engine, **options)
    assert started["environment"] == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert make_host(monkeypatch, "cuda", engine, **options)["environment"] == {}
    with pytest.raises(
        ConfigError, match=r"roles\.actor\.device is 'cuda:2', and the engine has 4 workers.*GPUs 2 to 5 are needed"
    ):
        make_host(monkeypatch, "cuda:2", engine, **options)


@pytest.mark.parametrize("options", [{}, {"host": "child"}, {"python": "other-python"}], ids=str)
def test_every_data_parallel_rank_sees_the_gpus_of_all(monkeypatch, options):
    """vLLM gives each its own by ``VLLM_DP_RANK_LOCAL``."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    monkeypatch.setattr("chatlearn_vllm.generator.DataParallelHost", lambda name, timeout_s, **rest: rest)
    engine = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    started = make_host(monkeypatch, "cuda:1", engine, **options)
    assert started == {
        "num_ranks": 2,
        "python": options.get("python"),
        "environment": {"CUDA_VISIBLE_DEVICES": "4,5,6,7"},
    }


def test_in_the_workers_own_process_only_the_first_gpu_is_usable(monkeypatch):
    with pytest.raises(ConfigError, match=r"roles\.actor\.options\.host to child"):
        make_host(monkeypatch, "cuda:1", {})
