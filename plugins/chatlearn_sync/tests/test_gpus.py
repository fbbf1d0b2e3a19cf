from __future__ import annotations

from chatlearn_sync.gpus import VISIBLE, shared_gpu, visible_gpus


def test_ranks_take_the_gpus_that_follow_the_first_one(monkeypatch):
    monkeypatch.delenv(VISIBLE, raising=False)
    assert visible_gpus("cuda:2", 2) == ["2", "3"]
    assert visible_gpus("cuda") == ["0"]
    assert visible_gpus("cpu", 2) == []
    assert visible_gpus("local") == []


def test_a_process_that_sees_some_gpus_names_them_as_the_machine_does(monkeypatch):
    monkeypatch.setenv(VISIBLE, "5, GPU-abc,7")
    assert visible_gpus("cuda:0") == ["5"]
    assert visible_gpus("cuda:1", 2) == ["GPU-abc", "7"]


def test_a_gpu_is_shared_by_ends_of_one_host_alone():
    assert shared_gpu([("a", ["0"]), ("a", ["1"]), ("b", ["0"])]) is None
    assert shared_gpu([("a", ["0"]), ("b", ["3"]), ("b", ["2", "3"])]) == "GPU 3 of host b"
    assert shared_gpu([("a", []), ("a", [])]) is None
