import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from chatlearn_core.exceptions import ModelError, WeightSyncError
from chatlearn_hf.checkpoint_names import (
    checkpoint_layout,
    checkpoint_tensors,
    expected_manifest,
    load_checkpoint_tensors,
)
from chatlearn_hf.heads import load_model
from chatlearn_hf.model_directory import load_causal_lm

CASES = [(family, tie) for family in ("qwen3", "qwen2", "llama", "qwen3_moe") for tie in (True, False)]


@pytest.mark.parametrize(("family", "tie"), CASES)
def test_names_and_values_equal_those_of_save_pretrained(tiny, family, tie) -> None:
    path = tiny(family, tie)
    saved = load_file(path / "model.safetensors")
    loaded = load_causal_lm(str(path))
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    fresh.load_state_dict(loaded.state_dict())
    for model in (loaded, fresh):
        tensors = dict(checkpoint_tensors(model))
        assert tensors.keys() == saved.keys()
        assert all(torch.equal(tensors[name], saved[name]) for name in saved)


@pytest.mark.parametrize(("family", "tie"), CASES)
def test_manifest_of_directory_and_model_agree(tiny, family, tie) -> None:
    path = tiny(family, tie)
    ours, theirs = expected_manifest(path), expected_manifest(load_causal_lm(str(path)))
    assert ours.differences(theirs) == []
    assert dict(ours.aliases) == dict(theirs.aliases)
    assert dict(ours.aliases) == ({"lm_head.weight": "model.embed_tokens.weight"} if tie else {})


def test_manifest_in_another_dtype(tiny) -> None:
    assert {spec.dtype for spec in expected_manifest(tiny(), torch.bfloat16).tensors.values()} == {"bfloat16"}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_loading_is_the_inverse_and_in_place(tiny, family) -> None:
    path = tiny(family)
    model = load_causal_lm(str(path))
    storages = {name: p.data_ptr() for name, p in model.named_parameters()}
    new = {name: torch.randn(tensor.shape) for name, tensor in checkpoint_tensors(model)}
    assert load_checkpoint_tensors(model, new.items()) == set(new)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == storages
    # Independent of our reading: what transformers itself writes afterwards.
    model.save_pretrained(path.parent / f"again-{family}")
    saved = load_file(path.parent / f"again-{family}" / "model.safetensors")
    assert all(torch.equal(saved[name], new[name]) for name in new)


def test_a_tied_name_may_arrive_too(tiny) -> None:
    model = load_causal_lm(str(tiny()))
    new = torch.randn_like(model.lm_head.weight)
    load_checkpoint_tensors(model, [("lm_head.weight", new)])
    assert torch.equal(model.model.embed_tokens.weight, new)


def test_unknown_names_and_wrong_shapes_are_refused(tiny) -> None:
    model = load_causal_lm(str(tiny("qwen3_moe")))
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    assert fused in model.state_dict()
    with pytest.raises(WeightSyncError, match="gate_up_proj"):
        load_checkpoint_tensors(model, [(fused, torch.zeros(1))])
    with pytest.raises(WeightSyncError, match=r"shape \[2, 2\] arrived"):
        load_checkpoint_tensors(model, [("model.norm.weight", torch.zeros(2, 2))])
    assert load_checkpoint_tensors(model, [("nobody", torch.zeros(1))], strict_names=False) == set()


def test_layout_needs_no_values(tiny) -> None:
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny("qwen3_moe")))
    assert checkpoint_layout(shell).manifest().tensors.keys() == expected_manifest(tiny("qwen3_moe")).tensors.keys()


@pytest.mark.parametrize("head", ["value", "reward"])
def test_a_head_is_part_of_the_checkpoint(tiny, tmp_path, head) -> None:
    model = load_model(str(tiny()), head)
    model.save_pretrained(tmp_path / head)
    manifest = expected_manifest(tmp_path / head)
    assert "score.weight" in manifest.tensors
    assert manifest.differences(expected_manifest(model)) == []


def test_a_directory_without_weights_is_named(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        expected_manifest(tmp_path)
