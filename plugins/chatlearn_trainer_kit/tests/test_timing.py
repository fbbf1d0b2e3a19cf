import time

import pytest
import torch

from chatlearn_trainer_kit.timing import PhaseTimer


def test_phases_of_one_name_add_up() -> None:
    timer = PhaseTimer(torch.device("cpu"))
    began = time.perf_counter()
    for name in ("forward", "backward", "forward"):
        with timer.phase(name):
            time.sleep(0.002)
    whole = time.perf_counter() - began
    metrics = timer.metrics()
    assert metrics.keys() == {"timing_s/forward", "timing_s/backward"}
    assert metrics["timing_s/forward"].total >= 0.004
    assert sum(metric.total for metric in metrics.values()) <= whole


@pytest.mark.gpu
def test_a_gpu_is_timed_by_events() -> None:
    timer = PhaseTimer(torch.device("cuda"))
    with timer.phase("forward"):
        torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")
    assert timer.metrics()["timing_s/forward"].total > 0
