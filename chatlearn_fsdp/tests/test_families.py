"""A training step of models of many families has the gradients of each sequence alone in transformers' own code."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from chatlearn_core.exceptions import ModelError
from chatlearn_core.types import TrainBatch
from chatlearn_hf.tiny_architectures import DYNAMIC_ROPE, LONG_ROPE, build_tiny

pytestmark = pytest.mark.engine

PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_dynamic_rope": ("llama", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 12}),
    "qwen2_windows": ("qwen2", {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 6}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mistral": ("mistral", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
    "granite": ("granite", {}),
    "cohere2": ("cohere2", {}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt2": ("gpt2", {}),
    "phi3_longrope": ("phi3", {"rope_parameters": LONG_ROPE, "sliding_window": None}),
}
PADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5_text", {}),
    "mamba": ("mamba", {}),
    "lfm2": ("lfm2_moe", {}),
    "jamba": ("jamba", {}),
    "phimoe": ("phimoe", {}),
    "bloom": ("bloom", {}),
    "gptj": ("gptj", {}),
}


def save(family: str, directory: Path) -> str:
    model_type, fields = (PACKED | PADDED)[family]
    build_tiny(model_type, vocab_size=320, **fields).save_pretrained(directory)
    return str(directory)


def gradients_alone(path: str, batch: TrainBatch, policy_loss) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and its gradients from a loop over sequences, each through a plain ``model(input_ids)``."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    total = 0.0
    # In ascending order: rotary embeddings of type dynamic keep the frequencies of the longest sequence so far.
    for start, stop in sorted(itertools.pairwise(batch.cu_seqlens.tolist()), key=lambda ends: ends[1] - ends[0]):
        tokens, rows = batch.token_ids[start:stop], slice(start, stop)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float() / policy_loss.temperature
        distribution = logits.log_softmax(-1)
        logprobs = distribution.gather(-1, tokens[1:, None]).squeeze(-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        weight, advantage = (batch.token_data[name][rows][1:] for name in ("loss_weight", "advantages"))
        loss = -(weight * (advantage * logprobs + 0.1 * entropy)).sum()
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", [*PACKED, *PADDED])
def test_loss_and_gradients_are_those_of_each_sequence_alone(
    tmp_path, caplog, make_trainer, make_batch, policy_loss, gradients_of, family
) -> None:
    path, batch = save(family, tmp_path), make_batch()
    with caplog.at_level(logging.WARNING, logger="chatlearn_hf"):
        trainer = make_trainer(path=path, grad_clip=None, max_tokens_per_micro_batch=64)
    told = [record.message for record in caplog.records if record.name == "chatlearn_hf.forward_check"]
    if family in PACKED:
        assert told == []
    else:
        assert len(told) == 1
        assert "sequences padded instead of attention varlen, sequences packed, which gives wrong results: " in told[0]
    metrics = trainer.update(batch, policy_loss)
    loss, expected = gradients_alone(path, batch, policy_loss)
    assert metrics["loss"].value == pytest.approx(loss, rel=1e-5)
    gradients = gradients_of(trainer)
    assert gradients.keys() >= expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * max(gradient.norm(), 1e-4), name


def test_padding_counts_in_micro_batches_and_their_metric(tmp_path, make_trainer, make_batch, policy_loss) -> None:
    """Lengths 40, 38 | 22, 17, 9 | 7, 1."""
    trainer = make_trainer(path=save("mamba", tmp_path), max_tokens_per_micro_batch=80)
    metrics = trainer.update(make_batch(), policy_loss)
    assert metrics["perf/micro_batches"].value == 3
    assert metrics["perf/computed_tokens"].value == 2 * 40 + 3 * 22 + 2 * 7
    assert metrics["perf/tokens"].value == make_batch().num_tokens


def test_wrong_settings_are_refused_with_the_correct_ones(tmp_path, make_trainer) -> None:
    with pytest.raises(ModelError) as refused:
        make_trainer(path=save("gemma2", tmp_path), attention="sdpa")
    message = str(refused.value)
    assert message.startswith(
        f"roles.trainer ({tmp_path}): model type 'gemma2' is not computed right with attention 'sdpa'"
    )
    assert "Correct for this model: attention varlen, sequences packed; attention eager" in message
    for advised in ({"attention": "varlen"}, {"attention": "eager", "sequences": "padded"}):
        make_trainer(path=str(tmp_path), **advised)


def test_an_unsupported_attention_is_refused_with_the_supported_ones(tmp_path, make_trainer) -> None:
    with pytest.raises(
        ModelError, match=r"GPTJForCausalLM has no attention 'sdpa'.*Correct for this model: attention eager"
    ):
        make_trainer(path=save("gptj", tmp_path), attention="sdpa")


def test_ulysses_needs_packed_rows(make_trainer) -> None:
    with pytest.raises(ValueError, match="ulysses 2 splits the tokens of packed rows, but sequences is 'padded'"):
        make_trainer(ulysses=2, sequences="padded")
