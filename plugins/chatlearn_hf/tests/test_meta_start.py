import pytest
import torch

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.checkpoint_names import checkpoint_layout
from chatlearn_hf.heads import load_model
from chatlearn_hf.meta_start import CheckpointFiles, build_on_meta, local_directory, restore_buffers
from chatlearn_hf.model_directory import load_causal_lm


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_the_structure_is_that_of_a_loaded_model_and_takes_no_memory(tiny, family) -> None:
    shell, loaded = build_on_meta(tiny(family)), load_causal_lm(str(tiny(family)))
    assert all(tensor.is_meta for tensor in [*shell.parameters(), *shell.buffers()])
    assert {n: (p.shape, p.dtype) for n, p in shell.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in loaded.named_parameters()
    }
    assert shell.config._attn_implementation == loaded.config._attn_implementation
    assert not shell.training


def test_buffers_are_those_of_a_loaded_model(tiny) -> None:
    path = tiny("llama")
    scaled = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}}
    shell = build_on_meta(path, **scaled).to_empty(device="cpu")
    for buffer in shell.buffers():
        buffer.fill_(torch.nan)
    restore_buffers(shell)
    expected = dict(load_causal_lm(str(path), **scaled).named_buffers())
    assert expected
    for name, buffer in shell.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_a_head_comes_with_one_label(tiny) -> None:
    assert build_on_meta(tiny(), "value").score.weight.shape == load_model(str(tiny()), "value").score.weight.shape


def test_an_argument_that_is_no_configuration_field_is_refused(tiny) -> None:
    with pytest.raises(ModelError, match="low_cpu_mem_usage is not a field of Qwen3Config"):
        build_on_meta(tiny(), low_cpu_mem_usage=True)


def test_rows_of_a_tensor(tiny) -> None:
    model = load_causal_lm(str(tiny()))
    layout = checkpoint_layout(model)
    with CheckpointFiles(tiny()) as files:
        name = "model.layers.1.mlp.up_proj.weight"
        assert torch.equal(files.rows(name, 5, 9), model.get_parameter(name)[5:9])
        assert files.differences(layout, "lm") == ([], [])
        assert files.source("nobody", layout) is None
        other = checkpoint_layout(build_on_meta(tiny(), intermediate_size=96))
        assert "model.layers.0.mlp.up_proj.weight" in files.differences(other, "lm")[1]
        critic = checkpoint_layout(build_on_meta(tiny(), "value"))
        assert files.differences(critic, "value") == ([], [])
        assert files.differences(critic, "lm")[0] == ["score.weight", "score.bias"]


def test_a_directory_that_is_not_there(tmp_path) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        local_directory(str(tmp_path / "nothing"))
