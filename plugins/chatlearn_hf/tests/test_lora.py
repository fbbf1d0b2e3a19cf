import json
import sys

import peft
import pytest
import torch
from safetensors.torch import save_file

from chatlearn_core.exceptions import BackendError, ModelError
from chatlearn_hf.checkpoint_names import checkpoint_layout
from chatlearn_hf.heads import load_model
from chatlearn_hf.lora import (
    LoraSettings,
    adapter_config,
    adapter_names,
    adapter_state,
    adapters,
    add_adapters,
    base_state,
    draw_adapters,
)
from chatlearn_hf.model_directory import load_causal_lm
from chatlearn_hf.packed_forward import packed_logits
from chatlearn_hf.tiny import build_tiny_model


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


FAMILIES = {
    "qwen3": {},
    "gpt2": {},  # keeps its weights transposed
    "qwen3_moe": {},  # experts in one tensor
    "deepseek_v3": {  # the same, beside shared experts that are linear layers
        "qk_rope_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
    },
}


@pytest.fixture(scope="session", params=FAMILIES)
def family(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("lora") / request.param
    return build_tiny_model(path, request.param, hidden=32, kv_heads=4, **FAMILIES[request.param])


def plain_logits(model) -> torch.Tensor:
    tokens = torch.randint(0, 300, (2, 19), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def test_merged_weights_compute_what_the_adapted_model_does_in_every_family(family) -> None:
    model, merged = (load_causal_lm(str(family), attention="eager") for _ in range(2))
    before = plain_logits(model)
    add_adapters(model, LoraSettings(rank=3, alpha=6.0))
    draw_adapters(model, 7, copy)
    for key, adapter in adapters(model).items():
        adapter.up.normal_(0, 0.2, generator=torch.Generator().manual_seed(len(key)))
        weight = merged.get_parameter(key).detach()
        # In parts, as ranks hold rows of it.
        for rows in (slice(0, 5), slice(5, None)):
            parts = (adapter.down[:, rows], adapter.up) if adapter.transposed else (adapter.down, adapter.up[rows])
            weight[rows] = adapter.merge(weight[rows], *parts)
    torch.testing.assert_close(plain_logits(model), plain_logits(merged), atol=1e-4, rtol=0)
    assert (plain_logits(merged) - before).abs().max() > 0.1


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_peft_loads_what_is_sent_as_an_adapter(name, tmp_path) -> None:
    directory = build_tiny_model(tmp_path / "base", name, hidden=32, kv_heads=4)
    settings = LoraSettings(rank=3, alpha=6.0)
    model = load_causal_lm(str(directory), attention="eager")
    add_adapters(model, settings)
    draw_adapters(model, 7, copy)
    tensors = {}
    for (key, adapter), names in zip(adapters(model).items(), adapter_names(model).values(), strict=True):
        adapter.up.normal_(0, 0.2, generator=torch.Generator().manual_seed(len(key)))
        tensors |= dict(zip(names, (adapter.down.clone(), adapter.up.clone()), strict=True))
    (tmp_path / "adapter").mkdir()
    config = adapter_config(model, settings)
    assert config["fan_in_fan_out"] is (name == "gpt2")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    loaded = peft.PeftModel.from_pretrained(load_causal_lm(str(directory), attention="eager"), tmp_path / "adapter")
    torch.testing.assert_close(plain_logits(loaded), plain_logits(model), atol=1e-4, rtol=0)


def test_an_adapter_of_some_modules_names_those_alone(tmp_path) -> None:
    directory = build_tiny_model(tmp_path / "base", "gpt2", hidden=32, kv_heads=4)
    model = load_causal_lm(str(directory), attention="eager")
    settings = LoraSettings(rank=3, alpha=6.0, target_modules=("attn.c_proj", "c_fc"))
    add_adapters(model, settings)
    # mlp.c_proj has no adapter, so attn.c_proj cannot go by its ending.
    targets = [f"transformer.h.{layer}.attn.c_proj" for layer in range(2)]
    assert adapter_config(model, settings)["target_modules"] == ["c_fc", *targets]


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


def test_without_peft_the_error_says_what_to_install(tiny, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(BackendError, match=r"chatlearn-fsdp\[lora\]"):
        adapted(tiny())


@pytest.mark.parametrize(
    ("family", "config", "target", "problem"),
    [
        ("qwen3", {}, "nobody", "'nobody' matches no module of Qwen3ForCausalLM; its linear layers are .*q_proj"),
        ("qwen3", {}, "embed_tokens", "embed_tokens of Qwen3ForCausalLM, which is a Embedding"),
        # The trunk would be sent without what was merged into the head, or with what was not.
        ("qwen3", {"tie": True}, "lm_head", r"shares its weight \(model\.embed_tokens\.weight and lm_head\.weight\)"),
        ("qwen3_moe", {}, "experts.gate_up_proj", "matches no module .*Experts that a model stores in one tensor"),
        ("qwen3_moe", {}, "mlp.gate", "which is a Qwen3MoeTopKRouter"),
        (
            "llama4_text",
            {"num_local_experts": 2, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 32},
            "router",
            "is a Llama4Router, not a plain linear layer",
        ),
        ("jamba", {"mamba_dt_rank": 4}, "dt_proj", "is not called: Jamba.* reads its weight"),
    ],
)
def test_targets_that_could_not_be_merged_exactly_are_refused_by_name(family, config, target, problem, tmp_path):
    directory = build_tiny_model(tmp_path / "m", family, **config)
    model = load_causal_lm(str(directory), attention="eager")
    with pytest.raises(ModelError, match=problem):
        add_adapters(model, LoraSettings(rank=2, alpha=2.0, target_modules=(target,)))


def test_an_untied_head_may_have_an_adapter(tiny) -> None:
    assert list(adapters(adapted(tiny("qwen3", False), target_modules=("lm_head",)))) == ["lm_head.weight"]


def test_layers_left_out_by_all_linear_are_logged(tiny, caplog) -> None:
    adapted(tiny("qwen3_moe"))
    assert "Qwen3MoeForCausalLM gets no adapters for down_proj, gate_up_proj" in caplog.text
