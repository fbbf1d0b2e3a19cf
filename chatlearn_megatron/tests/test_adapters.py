"""Adapters compute and learn in every layout what peft's do: outputs, each gradient of A and B, and exports."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chatlearn_core.exceptions import BackendError, CheckpointError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.types import TrainBatch
from chatlearn_hf.heads import load_model
from chatlearn_hf.lora import LoraSettings, adapter_names, add_adapters, drawn_downs
from chatlearn_megatron.options import MegatronOptions
from chatlearn_megatron.trainer import MegatronTrainer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TP, PP, CP, SP, EP = "tensor_parallel", "pipeline_parallel", "context_parallel", "sequence_parallel", "expert_parallel"
SETTINGS: dict[str, Any] = {"rank": 4, "alpha": 8.0}
SOME = SETTINGS | {"target_modules": ["k_proj", "up_proj", "down_proj"]}
LATENT = SETTINGS | {"target_modules": ["o_proj"]}
"""The one projection of latent attention that can have adapters."""
UPDATES = 3
Case = tuple[str, int, dict[str, Any]]
CASES: dict[str, Case] = {
    "one": ("qwen3", 1, {"gradient_checkpointing": True}),
    "data": ("qwen3", 2, {}),
    "split": ("qwen3", 2, {TP: 2}),
    "tokens": ("qwen3", 2, {TP: 2, SP: True}),
    "stages": ("qwen3", 2, {PP: 2}),
    "fused": ("gpt2", 2, {TP: 2}),
    "some": ("qwen3", 2, {TP: 2, SP: True, "lora": SOME}),
}
"""Name -> family, ranks and options; ranks that no option names are data parallel."""
THOROUGH: dict[str, Case] = {
    "context": ("qwen3", 2, {CP: 2}),
    "interleaved": ("qwen3", 2, {PP: 2, "virtual_pipeline": 2, "gradient_checkpointing": True}),
    "both": ("qwen3", 4, {TP: 2, SP: True, PP: 2}),
    "context and tokens": ("qwen3", 4, {TP: 2, SP: True, CP: 2}),
    "biased": ("qwen2", 2, {TP: 2, SP: True}),
    "untied": ("llama", 2, {PP: 2}),
    "fused tokens": ("gpt2", 2, {TP: 2, SP: True}),
    "experts": ("qwen3_moe", 2, {EP: 2}),
    "spread experts": ("qwen3_moe", 4, {TP: 2, SP: True, EP: 2}),
    "latent": ("deepseek_v3", 2, {TP: 2, SP: True, "lora": LATENT}),
}
PlainLoss = Callable[..., tuple[dict[str, torch.Tensor], torch.Tensor]]
Tensors = Mapping[str, torch.Tensor]


def jobs_of(cases: Mapping[str, Case], model_of: Callable[[str], str], exports: Path) -> dict[str, Any]:
    return {
        name: {
            "model": model_of(family),
            "world": world,
            "options": {"lora": SETTINGS} | options,
            "updates": UPDATES,
            "export": str(exports / name),
        }
        for name, (family, world, options) in cases.items()
    }


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each job exports its model, under its name."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def answers(run_jobs: Callable[..., Any], model_of: Callable[[str], str], batch: TrainBatch, exports: Path) -> Any:
    return run_jobs(jobs_of(CASES, model_of, exports), batch, exports / "jobs")


def with_peft(path: str, config: Mapping[str, Any], tensors: Tensors, directory: Path) -> torch.nn.Module:
    """The model as peft loads it, with the adapter whose files are written from what a trainer streams."""
    from peft import PeftModel

    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(dict(config)))
    model = load_model(path, "lm", attention="eager", seed=0)
    return PeftModel.from_pretrained(model, directory, is_trainable=True).eval()


def own_parts(values: torch.Tensor, own: list[int], batch: TrainBatch) -> torch.Tensor:
    bounds = batch.cu_seqlens.tolist()
    return torch.cat([values[bounds[index] : bounds[index + 1]] for index in own])


def check(
    ranks: list[dict[str, Any]], path: str, lora: dict[str, Any], batch: TrainBatch, exported: Path, loss_of: PlainLoss
) -> None:
    first = ranks[0]
    for rank in ranks:
        for step, tensors in enumerate(rank["adapters"]):
            assert tensors.keys() == first["adapters"][0].keys()
            assert all(torch.equal(tensor, first["adapters"][step][name]) for name, tensor in tensors.items())
        # Frozen weights have no gradients.
        assert rank["gradient_elements"] == rank["adapter_elements"] > 0
        assert rank["optimizer_elements"] == 0, "sgd has no state, and no copies of float32 weights"
        assert rank["offloaded_bytes"] == 0
    drawn = load_model(path, "lm", attention="eager", seed=0)
    add_adapters(drawn, LoraSettings(**lora))
    for weight, down in drawn_downs(drawn, 0):
        a, b = adapter_names(drawn)[weight]
        assert torch.equal(first["adapters"][0][a], down), "A starts in every layout as in the other trainers"
        assert not first["adapters"][0][b].any()
    model = None
    for step in range(UPDATES + 1):
        model = with_peft(path, first["adapter_config"], first["adapters"][step], exported / "adapter")
        named = {name.replace(".default.", "."): parameter for name, parameter in model.named_parameters()}
        outputs, loss = loss_of(model, "lm", batch)
        computed = {0: "computed", UPDATES: "computed_after"}.get(step)
        for rank in ranks if computed else ():
            for name, values in outputs.items():
                expected = own_parts(values.detach(), rank["own"], batch)
                torch.testing.assert_close(rank[computed][name], expected, rtol=1e-4, atol=1e-4)
        if step == UPDATES:
            break
        loss.backward()
        gradients = {name: named[name].grad for name in first["adapters"][0]}
        reported = sum(rank["metrics"][step].get("loss", 0.0) for rank in ranks)
        assert reported == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-5)
        norms = [rank["metrics"][step]["grad_norm"] for rank in ranks if "grad_norm" in rank["metrics"][step]]
        expected_norm = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in gradients.values()))
        assert norms == [pytest.approx(expected_norm, rel=1e-4)]
        for name, gradient in gradients.items():
            # A step of SGD with learning rate 1 and no clipping: the adapters differ by the gradient.
            assert step == 0 or float(gradient.norm()) > 1e-4, f"{name} learns once B is not zero"
            moved = first["adapters"][step][name] - first["adapters"][step + 1][name]
            assert float((moved - gradient).norm()) <= 1e-4 * float(gradient.norm()) + 1e-6, f"update {step}: {name}"
    assert model is not None
    # Experts, which transformers keeps in one tensor, stay as they were read.
    merged = load_file(Path(path) / "model.safetensors") | model.merge_and_unload().state_dict()
    written = load_file(exported / "model.safetensors")
    assert written.keys() == first["after"].keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, first["after"][name])
        torch.testing.assert_close(tensor, merged[name], rtol=1e-5, atol=1e-6)
    covered = {name: torch.full_like(tensor, math.nan) for name, tensor in written.items()}
    for rank in ranks:
        for name, _, box, _, tensor in rank["boxes"]:
            covered[name][tuple(slice(start, stop) for start, stop in box)] = tensor
    assert all(torch.equal(covered[name], tensor) for name, tensor in written.items())


@pytest.mark.parametrize("name", CASES)
def test_a_layout_equals_peft(
    name: str,
    answers: Any,
    model_of: Callable[[str], str],
    batch: TrainBatch,
    exports: Path,
    plain_loss: PlainLoss,
) -> None:
    family, _, options = CASES[name]
    check(answers[name], model_of(family), options.get("lora", SETTINGS), batch, exports / name, plain_loss)


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_further_layouts_equal_peft(
    run_jobs: Callable[..., Any],
    model_of: Callable[[str], str],
    batch: TrainBatch,
    tmp_path: Path,
    plain_loss: PlainLoss,
) -> None:
    found = run_jobs(jobs_of(THOROUGH, model_of, tmp_path), batch, tmp_path / "jobs")
    for name, (family, _, options) in THOROUGH.items():
        print(name)  # shown beside a failure
        check(found[name], model_of(family), options.get("lora", SETTINGS), batch, tmp_path / name, plain_loss)


ADAM = {"optimizer": "adamw", "learning_rate": 1e-2, "lora": SETTINGS}
SAVED: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data": (2, {}),
    "split": (2, {TP: 2, SP: True}),
    "stages": (2, {PP: 2, "virtual_pipeline": 2}),
}
RESHARDED = [("one", "split"), ("split", "data"), ("data", "stages"), ("stages", "one")]


def test_checkpoints_of_adapters_resume_in_other_layouts(
    run_jobs: Callable[..., Any], model_of: Callable[[str], str], batch: TrainBatch, tmp_path: Path
) -> None:
    """Two updates, a checkpoint and a third update give the same adapters in every layout; bit for bit in the same.
    Their optimizer is distributed over data parallel ranks.
    """
    path = model_of("qwen3")

    def job(name: str, **keys: Any) -> dict[str, Any]:
        return {"model": path, "world": SAVED[name][0], "options": ADAM | SAVED[name][1], **keys}

    jobs = {name: job(name, updates=2, save=str(tmp_path / name), more=1) for name in SAVED}
    jobs["weights"] = {"model": path, "options": ADAM | {"lora": None}, "save": str(tmp_path / "weights")}
    pairs = [*((name, name) for name in SAVED), *RESHARDED]
    jobs |= {f"{saved}-{name}": job(name, load=str(tmp_path / saved)) for saved, name in pairs}
    found = run_jobs(jobs, batch, tmp_path / "jobs")
    sizes = {name: sum(fact.num_bytes for fact in found[name][0]["facts"].values()) for name in ("one", "weights")}
    assert sizes["one"] < 0.5 * sizes["weights"], "a checkpoint of adapters has no frozen weights"
    [held] = {sum(rank["optimizer_elements"] for rank in found[name]) for name in ("one", "data")}
    assert held == 2 * found["one"][0]["adapter_elements"], "data parallel ranks share two moments of each adapter"
    start, expected = found["one"][0]["adapters"][0], found["one"][0]["trained"]
    for saved, name in pairs:
        for rank in found[f"{saved}-{name}"]:
            for tensor_name, tensor in rank["trained"].items():
                if saved == name:
                    same = found[name][0]["trained"][tensor_name]
                    assert torch.equal(tensor, same), (
                        f"{name}: {tensor_name} is not bit for bit what it would have been"
                    )
                moved = float((expected[tensor_name] - start[tensor_name]).norm())
                apart = float((tensor - expected[tensor_name]).norm())
                assert apart <= 0.01 * moved, f"{saved} resumed as {name}: {tensor_name} is {apart:.1e} off {moved:.1e}"


def test_a_head_learns_with_the_adapters(
    run_jobs: Callable[..., Any],
    model_of: Callable[[str], str],
    batch: TrainBatch,
    tmp_path: Path,
    plain_loss: PlainLoss,
) -> None:
    path = model_of("qwen3")
    layouts: dict[str, tuple[int, dict[str, Any]]] = {
        "one": (1, {}),
        "split": (2, {TP: 2, SP: True}),
        "stages": (2, {PP: 2}),
    }
    common = {"model": path, "head": "value", "updates": 2}
    jobs = {
        name: common | {"world": world, "options": {"lora": SETTINGS, "learning_rate": 0.1} | options}
        for name, (world, options) in layouts.items()
    }
    jobs |= {
        f"{name}-saved": job | {"updates": 1, "save": str(tmp_path / name), "more": 1} for name, job in jobs.items()
    }
    jobs["resumed"] = jobs["split"] | {"updates": 1, "load": str(tmp_path / "stages")}
    found = run_jobs(jobs, batch, tmp_path / "jobs")
    model = load_model(path, "value", attention="eager", seed=0)
    plain_loss(model, "value", batch)[1].backward()
    gradient = model.score.weight.grad
    for name in layouts:
        [first, last] = (found[name][0][when]["score.weight"] for when in ("before", "after"))
        assert torch.equal(first, model.score.weight)
        one_step = found[f"{name}-saved"][0]["stepped"]["score.weight"]
        assert float((first - one_step - 0.1 * gradient).norm()) <= 1e-4 * float(0.1 * gradient.norm())
        torch.testing.assert_close(last, found["one"][0]["after"]["score.weight"], rtol=1e-4, atol=1e-6)
        for tensor_name, tensor in found[name][0]["trained"].items():
            torch.testing.assert_close(tensor, found["one"][0]["trained"][tensor_name], rtol=1e-4, atol=1e-6)
    for tensor_name, tensor in found["resumed"][0]["after"].items():
        torch.testing.assert_close(tensor, found["split"][0]["after"][tensor_name], rtol=1e-4, atol=1e-6)


def test_adapters_are_gathered_while_the_next_forward_pass_computes(
    run_jobs: Callable[..., Any], model_of: Callable[[str], str], batch: TrainBatch, tmp_path: Path
) -> None:
    made = {"model": model_of("llama"), "world": 2, "updates": 2, "options": ADAM}
    late = {"options": ADAM | {"overlap": True}, "engine": {"ddp": {"bucket_size": 1000}}}
    found = run_jobs({"at once": made, "late": made | late}, batch, tmp_path / "jobs")
    for at_once, rank in zip(found["at once"], found["late"], strict=True):
        for name, tensor in at_once["trained"].items():
            assert torch.equal(rank["trained"][name], tensor), name


def test_adapters_in_bfloat16_have_float32_copies(
    run_jobs: Callable[..., Any], model_of: Callable[[str], str], batch: TrainBatch, tmp_path: Path
) -> None:
    common = {"model": model_of("qwen3"), "world": 2, "options": ADAM | {"param_dtype": "bfloat16", TP: 2, SP: True}}
    saving = common | {"updates": 2, "save": str(tmp_path / "saved"), "more": 1}
    found = run_jobs({"made": saving, "resumed": common | {"load": str(tmp_path / "saved")}}, batch, tmp_path / "jobs")
    for rank, resumed in zip(found["made"], found["resumed"], strict=True):
        assert {tensor.dtype for tensor in rank["trained"].values()} == {torch.bfloat16}
        assert rank["master_dtypes"] == {torch.float32}
        assert rank["optimizer_elements"] == 3 * rank["adapter_elements"], "two moments and a copy of each adapter"
        for name, tensor in rank["trained"].items():
            assert torch.equal(resumed["trained"][name], tensor), name


def test_weights_of_another_trainer_come_under_new_adapters(
    run_jobs: Callable[..., Any], model_of: Callable[[str], str], batch: TrainBatch, tmp_path: Path
) -> None:
    path = model_of("qwen3")
    sender = run_jobs({"sender": {"model": path, "world": 2, "options": {PP: 2}}}, batch, tmp_path / "sender")["sender"]
    torch.save([entry for rank in sender for entry in rank["boxes"]], tmp_path / "sent.pt")
    job = {"model": path, "world": 2, "options": {TP: 2, "lora": SETTINGS}, "take": str(tmp_path / "sent.pt")}
    for rank in run_jobs({"taker": job}, batch, tmp_path / "taker")["taker"]:
        assert any(not torch.equal(rank["trained"][name], tensor) for name, tensor in rank["adapters"][0].items())
        for name, tensor in rank["adapters"][0].items():
            assert torch.equal(rank["taken_adapters"][name], tensor), "adapters begin anew"
        for name, tensor in sender[0]["after"].items():
            assert torch.equal(rank["taken"][name], tensor), name


def test_what_fits_no_adapters_is_refused(model_of: Callable[[str], str], tmp_path: Path) -> None:
    def trainer(**options: Any) -> MegatronTrainer:
        path = model_of("qwen3")
        made = MegatronTrainer(
            MegatronOptions(**options), RoleContext("trainer", ModelSource(path, path), trainable=True)
        )
        made.setup()
        return made

    first = trainer()
    with pytest.raises(BackendError, match=r"payload 'adapter'.*set options\.lora, or weight_sync\.payload: full"):
        first.manifest("adapter")
    first.save(tmp_path / "weights")
    record = json.loads((tmp_path / "weights" / "trainer.json").read_text())
    del record["lora"]  # as before there were adapters
    (tmp_path / "weights" / "trainer.json").write_text(json.dumps(record))
    first.load(tmp_path / "weights")
    first.close()
    second = trainer(lora=SETTINGS)
    with pytest.raises(CheckpointError, match=r"lora None \(this trainer: .*'rank': 4"):
        second.load(tmp_path / "weights")
    second.close()
