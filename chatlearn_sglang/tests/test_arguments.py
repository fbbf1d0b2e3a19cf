from __future__ import annotations

from chatlearn_sglang.engine_side.arguments import CPU_ARGUMENTS, compose


def test_the_user_overrides_the_device_and_the_adapter_overrides_the_user() -> None:
    found = compose({"max_total_tokens": 5, "log_level": "info"}, {"dtype": "float32"}, cpu=True)
    assert found["max_total_tokens"] == 5
    assert found["log_level"] == "info"
    assert found["attention_backend"] == CPU_ARGUMENTS["attention_backend"]
    assert found["sampling_backend"] == "pytorch"
    assert compose({"a": 1}, {"a": 2}, cpu=False)["a"] == 2
    assert "attention_backend" not in compose({}, {}, cpu=False)


def test_a_gpus_memory_can_be_released_and_weights_are_then_kept_on_the_host() -> None:
    saving = compose({}, {}, cpu=False)
    assert saving["enable_memory_saver"] is saving["enable_weights_cpu_backup"] is True
    assert not {"enable_memory_saver", "enable_weights_cpu_backup"} & compose({}, {}, cpu=True).keys()
    assert compose({"enable_weights_cpu_backup": False}, {}, cpu=False)["enable_weights_cpu_backup"] is False
    kept = compose({"enable_memory_saver": False}, {}, cpu=False)
    assert kept["enable_memory_saver"] is False
    assert "enable_weights_cpu_backup" not in kept
