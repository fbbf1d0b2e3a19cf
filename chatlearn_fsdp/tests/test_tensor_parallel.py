"""What tensor parallel ranks split, and what they refuse when they start."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from chatlearn_fsdp.layouts import TENSOR_PARALLEL_TYPES
from chatlearn_fsdp.tensor_parallel import COLUMNS, OF_HEADS, ROWS
from chatlearn_hf.packed_forward import decoder_layers
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_hf.tiny_architectures import build_tiny


@pytest.mark.parametrize("model_type", TENSOR_PARALLEL_TYPES)
def test_the_plan_is_transformers_own(model_type: str) -> None:
    kinds = {
        **dict.fromkeys(COLUMNS, "colwise"),
        **dict.fromkeys(ROWS, "rowwise"),
        **dict.fromkeys(OF_HEADS, "replicated_with_grad_allreduce"),
    }
    plan = AutoConfig.for_model(model_type).base_model_tp_plan
    layer = decoder_layers(build_tiny(model_type))[0]
    inside = {
        name for name, module in layer.named_modules() if next(module.parameters(recurse=False), None) is not None
    }
    ours = {f"layers.*.{name}": kind for name, kind in kinds.items() if name in inside}
    assert {name: kind for name, kind in plan.items() if name.startswith("layers.")} == ours
    assert inside - kinds.keys() == {"input_layernorm", "post_attention_layernorm"}, "whole on every rank"


@pytest.mark.engine
def test_a_model_that_cannot_be_split_is_refused_when_it_starts(run_jobs, seven_sequences, tmp_path, capfd) -> None:
    model = str(build_tiny_model(tmp_path / "model", "qwen3"))
    job = {"model": model, "slices": [list(range(7))], "options": {"tensor_parallel": 4}}
    with pytest.raises(AssertionError, match="a rank failed"):
        run_jobs({"one": job}, seven_sequences, tmp_path / "answers")
    error = capfd.readouterr().err
    assert f"roles.trainer ({model}): tensor_parallel 4 does not divide the model's 2 key-value heads" in error
    assert "of 4 ranks it may be 1, 2" in error
