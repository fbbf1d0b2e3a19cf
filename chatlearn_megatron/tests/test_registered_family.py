"""A plugin adds an architecture: Seed-OSS, which has biases that no family of the trainer's own has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chatlearn_core.exceptions import ModelError, PluginError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.types import OutputRequest, TrainBatch
from chatlearn_hf.plain_forward import load_plain_model
from chatlearn_megatron.options import MegatronOptions

pytestmark = pytest.mark.engine

PLUGIN = """
    from chatlearn_core.plugins import hookimpl
    from chatlearn_core.plugins.records import ModelFamilySpec

    @hookimpl
    def chatlearn_model_families():
        return [
            ModelFamilySpec(
                name="seed",
                factory="chatlearn_hf.family:TransformersFamily",
                options="chatlearn_hf.options:TransformersFamilyOptions",
                model_types=frozenset({"seed_oss"}),
                layouts={"megatron": "LAYOUT"},
            )
        ]
"""
FAMILY = """
    from chatlearn_megatron.families import LLAMA, MegatronFamily

    def arguments(config):
        return LLAMA.arguments(config) | {"add_qkv_bias": config.attention_bias}

    SEED = MegatronFamily(("seed_oss",), arguments, LLAMA.places)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.for_model(
        "seed_oss",
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()  # transformers starts them at zero, where leaving one out shows nothing
    made.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def trainer_of(model: str) -> Any:
    from chatlearn_megatron.trainer import MegatronTrainer

    return MegatronTrainer(MegatronOptions(), RoleContext("trainer", ModelSource(model, model)))


def test_its_logprobs_are_those_of_transformers(fake_environment: Any, model: str, batch: TrainBatch) -> None:
    fake_environment.install(
        "acme-seed", PLUGIN.replace("LAYOUT", "acme_seed_layout:SEED"), modules={"acme_seed_layout": FAMILY}
    )
    trainer = trainer_of(model)
    trainer.setup()
    try:
        found = trainer.compute(batch, OutputRequest(frozenset({"logprobs"})))["logprobs"]
    finally:
        trainer.close()
    plain = load_plain_model(Path(model))
    start = 0
    for length in batch.lengths:
        tokens = batch.token_ids[start : start + length]
        with torch.no_grad():
            expected = torch.log_softmax(plain(tokens).float(), -1)[:-1].gather(-1, tokens[1:, None])[:, 0]
        trained = batch.loss_mask[start + 1 : start + length]
        torch.testing.assert_close(found[start + 1 : start + length][trained], expected[trained], atol=1e-5, rtol=0)
        start += length


def test_without_the_plugin_the_hook_is_named(model: str) -> None:
    trainer = trainer_of(model)
    with pytest.raises(ModelError, match=r"type 'seed_oss'; .*hook chatlearn_model_families"):
        trainer.setup()
    trainer.close()


def test_a_plugin_takes_precedence_over_the_families_of_the_trainer(fake_environment: Any) -> None:
    """For llama, which both have; a third claim is ambiguous."""
    from transformers import AutoConfig

    from chatlearn_megatron.families import LLAMA, family_of

    config = AutoConfig.for_model("llama")
    assert family_of(config, "model") is LLAMA
    content = PLUGIN.replace("seed_oss", "llama").replace("LAYOUT", "chatlearn_megatron.families:GPT2")
    fake_environment.install("acme-llama", content)
    assert family_of(config, "model").model_types == ("gpt2",)
    fake_environment.install("other-llama", content.replace('"seed"', '"other"'))
    with pytest.raises(
        PluginError, match=r"acme-llama 1.0 and other-llama 1.0 register layouts of models of type 'llama'"
    ):
        family_of(config, "model")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("acme_seed_missing:SEED", r"acme-seed 1.0: the layout 'acme_seed_missing:SEED' .* cannot be imported"),
        ("json:loads", r"acme-seed 1.0: the layout 'json:loads' .* is a function; it must be a .*MegatronFamily"),
    ],
)
def test_a_wrong_layout_names_the_plugin(fake_environment: Any, model: str, layout: str, message: str) -> None:
    fake_environment.install("acme-seed", PLUGIN.replace("LAYOUT", layout))
    trainer = trainer_of(model)
    with pytest.raises(PluginError, match=message):
        trainer.setup()
    trainer.close()
