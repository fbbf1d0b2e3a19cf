import sys

import pytest
import torch

from chatlearn_core.exceptions import BackendError, ModelError
from chatlearn_hf.checkpoint_names import checkpoint_layout
from chatlearn_hf.heads import load_model
from chatlearn_hf.lora import LoraSettings, adapter_state, adapters, add_adapters, base_state, draw_adapters
from chatlearn_hf.model_directory import load_causal_lm
from chatlearn_hf.packed_forward import packed_logits


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def adapted(path, head="lm", **settings):
    model = load_model(str(path), head)
    add_adapters(model, LoraSettings(**({"rank": 3, "alpha": 6.0} | settings)))
    draw_adapters(model, 7, copy)
    return model


def test_a_new_adapter_changes_nothing_and_only_it_learns(tiny, make_batch) -> None:
    model, plain = adapted(tiny()), load_causal_lm(str(tiny()))
    with torch.no_grad():
        torch.testing.assert_close(packed_logits(model, make_batch()), packed_logits(plain, make_batch()))
    learned = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learned == adapter_state(model).keys()
    # Seven linear layers in each of two decoder layers, A and B; the head has none.
    assert len(learned) == 2 * 7 * 2
    assert not any("lm_head" in name for name in learned)


def test_base_names_are_those_of_the_model_without_adapters(tiny) -> None:
    plain = load_causal_lm(str(tiny())).state_dict()
    base = base_state(adapted(tiny()))
    assert base.keys() == plain.keys()
    assert all(torch.equal(base[name], plain[name]) for name in plain)


def test_merged_weights_compute_what_the_adapted_model_does(tiny, make_batch) -> None:
    model, merged = adapted(tiny()), load_causal_lm(str(tiny()))
    found = adapters(model)
    assert found.keys() <= {entry.key for entry in checkpoint_layout(merged).tensors}
    torch.manual_seed(0)
    for key, adapter in found.items():
        adapter.up.normal_(0, 0.1)
        assert adapter.scale == 2.0
        with torch.no_grad():
            weight = merged.get_parameter(key)
            weight.copy_(adapter.merge(weight, adapter.down, adapter.up))
    with torch.no_grad():
        ours, plain = packed_logits(model, make_batch()), packed_logits(merged, make_batch())
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=0)
        assert (plain - packed_logits(load_causal_lm(str(tiny())), make_batch())).abs().max() > 0.1


def test_values_depend_on_the_seed_alone(tiny) -> None:
    first, second = adapters(adapted(tiny())), adapters(adapted(tiny()))
    assert all(torch.equal(first[key].down, second[key].down) for key in first)
    assert not any(adapter.up.any() for adapter in first.values())
    down = first["model.layers.0.self_attn.q_proj.weight"].down
    # U(-1/8, 1/8) for 64 inputs.
    assert down.abs().max() <= 0.125
    assert down.std().item() == pytest.approx(0.125 / 3**0.5, rel=0.15)


def test_a_value_head_learns_whole(tiny) -> None:
    model = adapted(tiny(), "value", target_modules=("q_proj",))
    learned = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learned == adapter_state(model).keys()
    assert {"score.weight", "score.bias"} < learned
    assert len(adapters(model)) == 2


def test_without_peft_it_says_what_to_install(tiny, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(BackendError, match=r"chatlearn-fsdp\[lora\]"):
        adapted(tiny())


def test_targets_that_match_nothing_or_no_linear_layer_are_refused(tiny) -> None:
    with pytest.raises(ModelError, match="nobody"):
        adapted(tiny(), target_modules=("nobody",))
    with pytest.raises(ModelError, match=r"embed_tokens of Qwen3ForCausalLM, which is a Embedding"):
        adapted(tiny(), target_modules=("embed_tokens",))
