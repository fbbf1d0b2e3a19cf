"""The one-process trainer against plain transformers."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from chatlearn_core.exceptions import BackendError, CheckpointError, ConfigError
from chatlearn_core.protocols import LossOutput, ModelSource, RoleContext, Trainer
from chatlearn_core.types import OutputRequest, pack_samples
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_fsdp.trainer import FSDPTrainer
from chatlearn_hf.model_directory import load_causal_lm
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_trainer_kit.optimizer import optimizer_tensors

pytestmark = pytest.mark.engine


def alone(model, batch, temperature):
    """Logprobs and entropies of the learned tokens, each sequence from a transformers forward of its own."""
    logprobs, entropies = [], []
    bounds = batch.cu_seqlens.tolist()
    for start, stop in itertools.pairwise(bounds):
        ids = batch.token_ids[start:stop]
        logs = torch.log_softmax(model(ids[None]).logits[0].float() / temperature, -1)
        zero = logs.new_zeros(1)
        logprobs.append(torch.cat([zero, logs[:-1].gather(-1, ids[1:, None])[:, 0]]))
        entropies.append(torch.cat([zero, -(logs.exp() * logs).sum(-1)[:-1]]))
    return torch.cat(logprobs) * batch.loss_mask, torch.cat(entropies) * batch.loss_mask


def padded_reference_gradients(path, batch):
    """Loss and gradients of the test's loss from a plain model, one padded-free sequence at a time."""
    model = load_causal_lm(path, attention="eager")
    logprobs, entropies = alone(model, batch, 0.7)
    weight, advantage = batch.token_data["loss_weight"], batch.token_data["advantages"]
    total = -(weight * (advantage * logprobs + 0.1 * entropies)).sum()
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}


def test_it_is_a_trainer(make_trainer) -> None:
    assert isinstance(make_trainer(), Trainer)


@pytest.mark.parametrize("budget", [8192, 64, 1])
def test_compute_equals_plain_transformers(make_trainer, make_batch, model_path, policy_loss, budget) -> None:
    batch = make_batch()
    outputs = make_trainer(max_tokens_per_micro_batch=budget, trainable=False).compute(batch, policy_loss.needs)
    with torch.no_grad():
        logprobs, entropies = alone(load_causal_lm(model_path, attention="sdpa"), batch, 0.7)
    torch.testing.assert_close(outputs["logprobs"], logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs["entropy"], entropies, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens_per_micro_batch": 40},
        {"gradient_checkpointing": True},
        {"attention": "sdpa"},
        {"attention": "eager", "logits_chunk_tokens": 16},
        {"cpu_offload": True},
    ],
    ids=str,
)
def test_gradients_equal_a_loop_over_sequences(
    make_trainer, make_batch, policy_loss, model_path, gradients_of, options
) -> None:
    batch = make_batch()
    loss, expected = padded_reference_gradients(model_path, batch)
    trainer = make_trainer(grad_clip=None, **options)
    metrics = trainer.update(batch, policy_loss)
    assert metrics["loss"].value == pytest.approx(loss, rel=1e-5)
    total = torch.stack([g.norm() for g in expected.values()]).norm().item()
    assert metrics["grad_norm"].value == pytest.approx(total, rel=1e-4)
    for name, gradient in gradients_of(trainer).items():
        if options.get("cpu_offload"):
            gradient = gradient.full_tensor()
        assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


def test_metrics_of_a_loss_do_not_depend_on_micro_batches(make_trainer, make_batch, policy_loss) -> None:
    one, many = (
        make_trainer(max_tokens_per_micro_batch=budget).update(make_batch(), policy_loss)["entropy"]
        for budget in (8192, 40)
    )
    assert one.count == many.count
    assert one.total == pytest.approx(many.total, rel=1e-5)


def test_clipping_scales_the_step_but_not_the_reported_norm(make_trainer, make_batch, policy_loss) -> None:
    free = make_trainer(grad_clip=None).update(make_batch(), policy_loss)
    trainer = make_trainer(grad_clip=0.01)
    assert trainer.update(make_batch(), policy_loss)["grad_norm"].value == free["grad_norm"].value
    moments = optimizer_tensors(trainer._optimizer, trainer._model).values()
    # AdamW starts from 0: after one step exp_avg is (1 - beta1) times the gradient it saw.
    seen = torch.stack([entry["exp_avg"].norm() for entry in moments]).norm() / (1 - trainer.options.adam_beta1)
    assert seen.item() == pytest.approx(0.01, rel=1e-3)


def test_bfloat16_compute_keeps_float32_weights(make_trainer, make_batch, policy_loss, weights_of) -> None:
    trainer = make_trainer(param_dtype="bfloat16")
    exact = make_trainer().compute(make_batch(), policy_loss.needs)["logprobs"]
    rounded = trainer.compute(make_batch(), policy_loss.needs)["logprobs"]
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.2
    trainer.update(make_batch(), policy_loss)
    assert {tensor.dtype for tensor in weights_of(trainer).values()} == {torch.float32}


def test_weight_decay_spares_norms(make_trainer) -> None:
    trainer = make_trainer(weight_decay=0.1)
    for group in trainer._optimizer.param_groups:
        assert {p.dim() > 1 for p in group["params"]} == {group["weight_decay"] > 0}


def test_schedule_drives_the_learning_rate(make_trainer, make_batch, policy_loss) -> None:
    trainer = make_trainer(schedule="linear", learning_rate=1.0e-3, total_updates=4)
    rates = [trainer.update(make_batch(), policy_loss)["lr"].value for _ in range(3)]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3])


def test_non_finite_loss_names_the_micro_batch_and_changes_nothing(
    make_trainer, make_batch, policy_loss, weights_of
) -> None:
    class Poisoned(type(policy_loss)):
        def __call__(self, outputs, batch):
            result = super().__call__(outputs, batch)
            return LossOutput(result.total * float("nan")) if "s3" in batch.sample_ids else result

    trainer = make_trainer(max_tokens_per_micro_batch=1)
    before = weights_of(trainer)
    with pytest.raises(BackendError, match=r"samples s3\. The weights are unchanged"):
        trainer.update(make_batch(), Poisoned())
    after = weights_of(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    trainer.update(make_batch(), policy_loss)
    assert trainer.num_updates == 1


def test_an_empty_batch_computes_nothing_and_updates(make_trainer, make_batch, policy_loss) -> None:
    trainer = make_trainer(grad_clip=None)
    empty = replace(pack_samples([]), token_data={"loss_weight": torch.zeros(0), "advantages": torch.zeros(0)})
    assert trainer.compute(empty, policy_loss.needs)["logprobs"].shape == (0,)
    metrics = trainer.update(empty, policy_loss)
    assert metrics["loss"].value == 0.0
    assert metrics["grad_norm"].value == 0.0


def test_value_and_reward_heads(make_trainer, make_batch) -> None:
    batch = make_batch()
    value, reward = make_trainer(head="value"), make_trainer(head="reward", max_tokens_per_micro_batch=50)
    values = value.compute(batch, OutputRequest(frozenset({"values"})))["values"]
    scores = reward.compute(batch, OutputRequest(frozenset({"scores"})))["scores"]
    bounds = batch.cu_seqlens.tolist()
    with torch.no_grad():
        for s, (start, stop) in enumerate(itertools.pairwise(bounds)):
            ids = batch.token_ids[start:stop]
            plain = load_causal_lm(value.context.model.path, attention="sdpa").base_model(ids[None]).last_hidden_state
            states = value._model.model.score(plain[0])[:, 0]
            expected = torch.cat([states.new_zeros(1), states[:-1]])
            torch.testing.assert_close(values[start:stop], expected * batch.loss_mask[start:stop], atol=1e-5, rtol=0)
            last = reward._model.model.score(plain[0, -1])[0]
            torch.testing.assert_close(scores[s], last, atol=1e-5, rtol=0)


def test_wrong_output_for_the_head_is_named(make_trainer, make_batch) -> None:
    with pytest.raises(BackendError, match="head 'value' cannot compute logprobs"):
        make_trainer(head="value").compute(make_batch(), OutputRequest(frozenset({"logprobs"})))


def test_reference_holds_no_optimizer_and_refuses_updates(make_trainer, make_batch, policy_loss) -> None:
    reference = make_trainer(trainable=False)
    assert reference.live_bytes("optimizer") == 0
    with pytest.raises(BackendError, match="does not learn"):
        reference.update(make_batch(), policy_loss)


def test_offloaded_parts_occupy_nothing_and_come_back(make_trainer, make_batch, policy_loss, weights_of) -> None:
    trainer, twin = make_trainer(), make_trainer()
    for each in (trainer, twin):
        each.update(make_batch(), policy_loss)
    sizes = {part: trainer.live_bytes(part) for part in ("weights", "optimizer")}
    assert all(sizes.values())
    before = weights_of(trainer)
    trainer.offload(["weights", "gradients", "optimizer", "kv_cache"])
    assert trainer.live_bytes("weights") == trainer.live_bytes("optimizer") == 0
    with pytest.raises(BackendError, match="weights are offloaded; onload them first"):
        trainer.compute(make_batch(), policy_loss.needs)
    trainer.onload(["weights", "gradients", "optimizer"])
    assert {part: trainer.live_bytes(part) for part in sizes} == sizes
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(trainer).items())
    for each in (trainer, twin):
        each.update(make_batch(1), policy_loss)
    ours, theirs = weights_of(trainer), weights_of(twin)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_stream_matches_the_manifest_and_what_save_pretrained_writes(make_trainer, model_path) -> None:
    trainer = make_trainer()
    saved = load_file(Path(model_path) / "model.safetensors")
    for export in ("full_tensors", "boxes"):
        shards = list(trainer.weights(export))
        assert [shard.name for shard in shards] == list(trainer.manifest().tensors)
        assert all(shard.is_whole and torch.equal(shard.tensor, saved[shard.name]) for shard in shards)
    assert {name: spec.shape for name, spec in trainer.manifest().tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }


def test_export_loads_with_from_pretrained(make_trainer, make_batch, policy_loss, tmp_path) -> None:
    trainer = make_trainer()
    trainer.update(make_batch(), policy_loss)
    trainer.export_model(tmp_path / "export")
    batch = make_batch(2)
    with torch.no_grad():
        logprobs, _ = alone(load_causal_lm(str(tmp_path / "export"), attention="sdpa"), batch, 0.7)
    torch.testing.assert_close(trainer.compute(batch, policy_loss.needs)["logprobs"], logprobs, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template


@pytest.fixture(scope="module", params=["qwen3", "gpt2"])
def adapted_path(request, model_path, tmp_path_factory) -> str:
    """GPT-2 keeps its weights transposed."""
    if request.param == "qwen3":
        return model_path
    return str(build_tiny_model(tmp_path_factory.mktemp("models") / "gpt2", "gpt2", n_inner=128))


def test_adapters_learn_and_leave_merged_while_weights_stay(
    make_trainer, make_batch, policy_loss, weights_of, adapted_path, tmp_path
) -> None:
    trainer = make_trainer(path=adapted_path, lora={"rank": 4, "alpha": 8.0})
    frozen = {name: p.clone() for name, p in trainer._model.named_parameters() if not p.requires_grad}
    before = weights_of(trainer)
    for seed in range(2):
        trainer.update(make_batch(seed), policy_loss)
    assert all(torch.equal(p, frozen[name]) for name, p in trainer._model.named_parameters() if name in frozen)
    after = weights_of(trainer)
    assert list(after) == list(trainer.manifest().tensors)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if name.endswith(("proj.weight", "c_attn.weight", "c_fc.weight"))}
    rows = list(trainer.weights("boxes"))
    assert all(torch.equal(shard.tensor, after[shard.name]) for shard in rows)
    trainer.export_model(tmp_path / "export")
    saved = load_file(tmp_path / "export" / "model.safetensors")
    assert saved.keys() == after.keys()
    assert all(torch.equal(saved[name], after[name]) for name in saved)
    batch = make_batch(2)
    with torch.no_grad():
        logprobs, _ = alone(load_causal_lm(str(tmp_path / "export"), attention="sdpa"), batch, 0.7)
    torch.testing.assert_close(trainer.compute(batch, policy_loss.needs)["logprobs"], logprobs, atol=1e-5, rtol=0)


def test_an_adapter_streamed_alone_is_what_peft_loads(
    make_trainer, make_batch, policy_loss, adapted_path, tmp_path
) -> None:
    trainer = make_trainer(path=adapted_path, lora={"rank": 4, "alpha": 8.0})
    trainer.update(make_batch(), policy_loss)
    manifest = trainer.manifest("adapter")
    tensors = {shard.name: shard.tensor.contiguous() for shard in trainer.weights(payload="adapter")}
    assert list(tensors) == list(manifest.tensors)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: spec.shape for name, spec in manifest.tensors.items()
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(dict(manifest.adapter)))
    adapted = PeftModel.from_pretrained(load_causal_lm(adapted_path, attention="sdpa"), str(tmp_path)).eval()
    batch = make_batch(2)
    with torch.no_grad():
        logprobs, _ = alone(adapted, batch, 0.7)
    torch.testing.assert_close(trainer.compute(batch, policy_loss.needs)["logprobs"], logprobs, atol=1e-5, rtol=0)


def test_a_trainer_without_adapters_refuses_to_stream_them(make_trainer) -> None:
    trainer = make_trainer()
    with pytest.raises(BackendError, match=r"payload 'adapter'.*set options\.lora, or weight_sync\.payload: full"):
        trainer.manifest("adapter")


def test_adapters_resume_bit_identical_and_only_with_the_same_shape(
    make_trainer, make_batch, policy_loss, weights_of, tmp_path
) -> None:
    straight, resumed = (make_trainer(lora={"rank": 4, "alpha": 8.0}) for _ in range(2))
    straight.update(make_batch(0), policy_loss)
    straight.save(tmp_path / "saved")
    resumed.load(tmp_path / "saved")
    for trainer in (straight, resumed):
        trainer.update(make_batch(1), policy_loss)
    ours, theirs = weights_of(straight), weights_of(resumed)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(CheckpointError, match=r"lora \{.*'rank': 4"):
        make_trainer(lora={"rank": 2, "alpha": 8.0}).load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"this trainer: None"):
        make_trainer().load(tmp_path / "saved")


def test_loading_and_exporting_draw_no_progress_bars(make_trainer, tmp_path, capfd) -> None:
    make_trainer().export_model(tmp_path / "export")
    assert "it/s" not in capfd.readouterr().err


def test_reserved_engine_argument_is_refused(model_path) -> None:
    context = RoleContext("policy", ModelSource(model_path, model_path), engine_arguments={"dtype": "float16"})
    with pytest.raises(ConfigError, match=r"roles\.policy\.engine holds arguments(?s:.*)dtype: owned by the backend"):
        FSDPTrainer(FSDPOptions(), context)


def test_closing_twice_is_fine_and_then_it_refuses(make_trainer, make_batch, policy_loss) -> None:
    trainer = make_trainer()
    assert trainer.health() is None
    trainer.close()
    trainer.close()
    assert trainer.health()
    with pytest.raises(BackendError, match="closed"):
        trainer.compute(make_batch(), policy_loss.needs)


@pytest.mark.engine
def test_a_step_that_fails_midway_is_reported_until_a_checkpoint_is_loaded(
    make_trainer, make_batch, policy_loss, weights_of, tmp_path, monkeypatch
) -> None:
    trainer = make_trainer()
    trainer.update(make_batch(), policy_loss)
    trainer.save(tmp_path / "saved")
    whole = {name: tensor.clone() for name, tensor in weights_of(trainer).items()}

    def broken_step() -> None:
        raise torch.OutOfMemoryError("no memory for the second moment")

    monkeypatch.setattr(trainer._optimizer, "step", broken_step)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.update(make_batch(1), policy_loss)
    assert "optimizer step 1 failed midway (OutOfMemoryError)" in trainer.health()
    with pytest.raises(BackendError, match=r"cannot work: optimizer step 1 failed midway .*; load a checkpoint"):
        trainer.compute(make_batch(1), OutputRequest(frozenset({"logprobs"})))
    monkeypatch.undo()
    trainer.load(tmp_path / "saved")
    assert trainer.health() is None
    assert all(torch.equal(whole[name], tensor) for name, tensor in weights_of(trainer).items())
    trainer.update(make_batch(1), policy_loss)
