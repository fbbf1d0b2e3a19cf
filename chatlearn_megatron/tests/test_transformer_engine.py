"""TransformerEngine's layers: who gets them, which parameters theirs are, and, on a GPU, what they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.types import OutputRequest, TrainBatch
from chatlearn_hf.heads import load_model
from chatlearn_megatron import engine_layers
from chatlearn_megatron.options import MegatronOptions
from chatlearn_megatron.trainer import MegatronTrainer
from chatlearn_testing.batches import MaskedPolicyLoss
from chatlearn_testing.model_directory import read_checkpoint

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt2")
TEMPERATURE = 0.7
"""Of ``plain_loss``."""
LOGPROBS = OutputRequest(frozenset({"logprobs"}), TEMPERATURE)
TF32 = 1e-2
"""Maximum error of a logprob, nats: matrices are multiplied with 10 bits of mantissa."""


def context_on(device: str, path: str = "model") -> RoleContext:
    return RoleContext("trainer", ModelSource(path, path), device=device, trainable=True)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.0.input_layernorm.weight"),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_bias", "decoder.layers.3.input_layernorm.bias"),
        ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "decoder.layers.1.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.1.mlp.experts.linear_fc2.weight13",
            "decoder.layers.1.mlp.experts.local_experts.13.linear_fc2.weight",
        ),
        ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc1.weight"),
        ("decoder.layers.1.self_attention.linear_qkv.bias", "decoder.layers.1.self_attention.linear_qkv.bias"),
    ],
)
def test_a_fused_parameter_has_the_place_of_the_own_one(name: str, own: str) -> None:
    assert engine_layers.place_name(name) == own


@pytest.mark.parametrize(
    ("options", "device", "installed", "has_latents", "expected"),
    [
        ({"param_dtype": "bfloat16"}, "cuda", True, False, True),
        ({"param_dtype": "bfloat16"}, "cuda", False, False, False),
        ({"param_dtype": "bfloat16"}, "cpu", True, False, False),
        ({"param_dtype": "bfloat16"}, "cuda", True, True, False),
        ({"param_dtype": "bfloat16", "lora": {}}, "cuda", True, False, False),
        ({"param_dtype": "float32"}, "cuda", True, False, False),
        ({"param_dtype": "bfloat16", "transformer_engine": False}, "cuda", True, False, False),
        ({"param_dtype": "float32", "transformer_engine": True}, "cuda", True, False, True),
    ],
)
def test_layers_are_chosen(
    options: dict[str, Any],
    device: str,
    installed: bool,
    has_latents: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_layers, "HAVE_TE", installed)
    found = engine_layers.uses_transformer_engine(
        MegatronOptions(**options), context_on(device), has_latent_attention=has_latents
    )
    assert found is expected


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options, choose = MegatronOptions(transformer_engine=True), engine_layers.uses_transformer_engine
    monkeypatch.setattr(engine_layers, "HAVE_TE", False)
    with pytest.raises(
        BackendError, match=r"roles\.trainer\.options\.transformer_engine is true, but the device is cpu"
    ):
        choose(options, context_on("cpu"), has_latent_attention=False)
    with pytest.raises(BackendError, match=r"not installed; run: pip install 'chatlearn-megatron\[transformer-eng"):
        choose(options, context_on("cuda:0"), has_latent_attention=False)
    with pytest.raises(ConfigError, match="latent attention runs on Megatron-Core's own layers"):
        choose(options, context_on("cuda:0"), has_latent_attention=True)
    with pytest.raises(ValidationError, match="adapters run on Megatron-Core's own layers"):
        MegatronOptions(transformer_engine=True, lora={})


@pytest.fixture
def make_trainer(model_of: Callable[[str], str], request: pytest.FixtureRequest) -> Callable[..., MegatronTrainer]:
    """``make_trainer(family, device, **options)``; closed after the test."""

    def make(family: str, device: str, **options: Any) -> MegatronTrainer:
        trainer = MegatronTrainer(MegatronOptions(learning_rate=1e-3, **options), context_on(device, model_of(family)))
        request.addfinalizer(trainer.close)
        trainer.setup()
        return trainer

    return make


@pytest.fixture
def on_gpu(make_trainer: Callable[..., MegatronTrainer]) -> Callable[..., MegatronTrainer]:
    """``on_gpu(family, **options)``: a trainer with TransformerEngine's layers unless the options say otherwise."""
    pytest.importorskip("transformer_engine")
    return lambda family, **options: make_trainer(family, "cuda", **({"transformer_engine": True} | options))


@pytest.mark.engine
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])
def test_the_own_layers_learn_in_bfloat16(
    family: str, make_trainer: Callable[..., MegatronTrainer], batch: TrainBatch
) -> None:
    loss, norms = MaskedPolicyLoss(), []
    for dtype in ("bfloat16", "float32"):
        trainer = make_trainer(family, "cpu", param_dtype=dtype)
        norms.append(trainer.update(loss.prepare(batch), loss)["grad_norm"].value)
        trainer.close()
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


@pytest.mark.gpu
@pytest.mark.engine
@pytest.mark.parametrize("family", FAMILIES)
def test_they_compute_what_plain_transformers_compute(
    family: str,
    on_gpu: Callable[..., MegatronTrainer],
    model_of: Callable[[str], str],
    batch: TrainBatch,
    plain_loss: Callable[..., Any],
) -> None:
    trainer = on_gpu(family)
    modules = {type(module).__name__ for module in trainer._model.chunks[0].modules()}
    assert "TELayerNormColumnParallelLinear" in modules
    assert ("TEColumnParallelGroupedLinear" in modules) == (family == "qwen3_moe")
    with torch.no_grad():
        expected, _ = plain_loss(load_model(model_of(family), "lm", attention="eager").eval(), "lm", batch)
    apart = (trainer.compute(batch, LOGPROBS)["logprobs"] - expected["logprobs"]).abs()
    # Where the scores of two experts are closer than TF32's rounding, a token may go to the other one.
    assert (apart <= TF32).float().mean() >= (0.9 if family == "qwen3_moe" else 1.0)
    assert apart.max() < 0.5


@pytest.mark.gpu
@pytest.mark.engine
@pytest.mark.parametrize("family", FAMILIES)
def test_they_hold_the_checkpoint_bit_for_bit(
    family: str, on_gpu: Callable[..., MegatronTrainer], model_of: Callable[[str], str], tmp_path: Path
) -> None:
    trainer, expected = on_gpu(family), read_checkpoint(Path(model_of(family)))
    streamed = {shard.name: shard.tensor.cpu() for shard in trainer.weights()}
    assert streamed.keys() == expected.keys()
    assert all(torch.equal(streamed[name], tensor) for name, tensor in expected.items())
    trainer.export_model(tmp_path / "exported")
    exported = read_checkpoint(tmp_path / "exported")
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


@pytest.mark.gpu
@pytest.mark.engine
@pytest.mark.parametrize("family", FAMILIES)
def test_they_learn_as_the_own_layers_do(
    family: str, on_gpu: Callable[..., MegatronTrainer], batch: TrainBatch
) -> None:
    """In bfloat16, which both round."""
    found, loss = [], MaskedPolicyLoss()
    for chosen in (None, False):
        trainer = on_gpu(family, param_dtype="bfloat16", transformer_engine=chosen)
        norms = [trainer.update(loss.prepare(batch), loss)["grad_norm"].value for _ in range(3)]
        found.append((norms, trainer.compute(batch, LOGPROBS)["logprobs"].mean().item()))
        trainer.close()
    (norms, level), (own_norms, own_level) = found
    assert norms == pytest.approx(own_norms, rel=0.1)
    assert level == pytest.approx(own_level, abs=0.05)


@pytest.mark.gpu
@pytest.mark.engine
def test_a_checkpoint_resumes_bit_for_bit(
    on_gpu: Callable[..., MegatronTrainer], batch: TrainBatch, tmp_path: Path
) -> None:
    trainer, loss = on_gpu("qwen3", param_dtype="bfloat16"), MaskedPolicyLoss()
    trainer.update(loss.prepare(batch), loss)
    trainer.save(tmp_path / "checkpoint")
    expected = trainer.update(loss.prepare(batch), loss)["grad_norm"].value
    weights = {shard.name: shard.tensor.cpu().clone() for shard in trainer.weights()}
    trainer.load(tmp_path / "checkpoint")
    assert trainer.update(loss.prepare(batch), loss)["grad_norm"].value == expected
    assert all(torch.equal(shard.tensor.cpu(), weights[shard.name]) for shard in trainer.weights())
