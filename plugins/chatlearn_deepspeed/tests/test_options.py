"""Options and DeepSpeed's own configuration are checked before anything starts."""

from __future__ import annotations

import json
import re

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_deepspeed.engine_arguments import engine_problems, native_configuration
from chatlearn_deepspeed.options import DeepSpeedOptions
from chatlearn_deepspeed.plugin import chatlearn_trainers


def test_ulysses_must_divide_the_ranks() -> None:
    DeepSpeedOptions.model_validate({"ulysses": 2}, context={"ranks": 6})
    with pytest.raises(
        ValueError, match=r"ulysses 4 does not divide the role's ranks: 6; set ulysses to one of 1, 2, 3, 6"
    ):
        DeepSpeedOptions.model_validate({"ulysses": 4}, context={"ranks": 6})
    with pytest.raises(ValueError, match=r"ring 4 does not divide the role's ranks: 6; set ring to one of 1, 2, 3, 6"):
        DeepSpeedOptions.model_validate({"ring": 4}, context={"ranks": 6})


def test_offloaded_parameters_need_stage_3() -> None:
    assert DeepSpeedOptions(zero_stage=3, offload_params=True).offload_params
    with pytest.raises(ValueError, match="zero_stage is 2"):
        DeepSpeedOptions(offload_params=True)


def test_bfloat16_needs_gradients_in_float32() -> None:
    assert DeepSpeedOptions(param_dtype="bfloat16").zero_stage == 2
    with pytest.raises(ValueError, match="zero_stage 1 with param_dtype bfloat16"):
        DeepSpeedOptions(zero_stage=1, param_dtype="bfloat16")


def test_stage_0_is_no_stage() -> None:
    with pytest.raises(ValueError, match="Input should be 1, 2 or 3"):
        DeepSpeedOptions(zero_stage=0)


def test_layout_options_exist() -> None:
    [record] = chatlearn_trainers()
    assert set(record.layout_options) <= DeepSpeedOptions.model_fields.keys()


def test_owned_and_unknown_keys_name_the_remedy() -> None:
    problems = engine_problems(
        {
            "optimizer": {"type": "Adam"},
            "zero_optimisation": {},
            "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000},
            "wall_clock_breakdown": True,
        }
    )
    assert problems.keys() == {"optimizer", "zero_optimisation", "zero_optimization.stage"}
    assert "options.optimizer" in problems["optimizer"]
    assert "did you mean 'zero_optimization'" in problems["zero_optimisation"]
    assert "options.zero_stage" in problems["zero_optimization.stage"]


def test_the_file_is_merged_under_the_engine_arguments(tmp_path) -> None:
    file = tmp_path / "zero.json"
    zero = {"stage": "auto", "reduce_bucket_size": 10, "overlap_comm": True}
    file.write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": zero, "wall_clock_breakdown": True}))
    merged = native_configuration("trainer", str(file), {"zero_optimization": {"reduce_bucket_size": 20}})
    assert merged == {
        "zero_optimization": {"reduce_bucket_size": 20, "overlap_comm": True},
        "wall_clock_breakdown": True,
    }


@pytest.mark.parametrize("content", ["{", "[]", '{"train_batch_size": 8}'])
def test_a_bad_file_is_named(tmp_path, content) -> None:
    file = tmp_path / "zero.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=rf"(?s)roles\.trainer\.options\.config_file.*|{re.escape(str(file))}"):
        native_configuration("trainer", str(file), {})
