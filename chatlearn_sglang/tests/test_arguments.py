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


def test_weights_that_can_be_released_are_kept_on_the_host() -> None:
    assert compose({"enable_memory_saver": True}, {}, cpu=False)["enable_weights_cpu_backup"] is True
    assert "enable_weights_cpu_backup" not in compose({}, {}, cpu=False)
    own = {"enable_memory_saver": True, "enable_weights_cpu_backup": False}
    assert compose(own, {}, cpu=False)["enable_weights_cpu_backup"] is False
