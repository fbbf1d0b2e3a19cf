"""Every layout of ranks computes what plain transformers compute: outputs, loss, gradient norm and each gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from chatlearn_core.types import TrainBatch
from chatlearn_hf.checkpoint_names import checkpoint_layout, checkpoint_tensors
from chatlearn_hf.heads import load_model

TP, PP, CP, SP, EP = "tensor_parallel", "pipeline_parallel", "context_parallel", "sequence_parallel", "expert_parallel"
LAYOUTS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "qwen3": [
        (1, {"gradient_checkpointing": True, "logits_chunk_tokens": 7}),
        (2, {"overlap": True}),
        (2, {CP: 2}),
        (2, {PP: 2, "virtual_pipeline": 2}),
        (4, {TP: 2, PP: 2, SP: True}),
        (4, {TP: 2, CP: 2, "logits_chunk_tokens": 7}),
    ],
    "qwen3_moe": [
        (2, {EP: 2}),
        (2, {TP: 2, SP: True, EP: 2, "expert_tensor_parallel": 1}),
        (4, {TP: 2, SP: True, EP: 2}),
        (4, {PP: 2, "virtual_pipeline": 2, EP: 2}),
    ],
    "qwen2": [(2, {TP: 2, SP: True})],
    "llama": [(2, {PP: 2})],
    "gpt2": [(1, {}), (2, {TP: 2})],
    "deepseek_v3": [
        (1, {"gradient_checkpointing": True}),
        (2, {TP: 2, SP: True}),
        (4, {PP: 2, "virtual_pipeline": 2, EP: 2}),
    ],
    "moonlight": [(2, {CP: 2}), (4, {TP: 2, SP: True, EP: 2, "expert_tensor_parallel": 1, PP: 2})],
}
THOROUGH: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "qwen3": [
        (2, {PP: 2, "gradient_checkpointing": True}),
        (4, {TP: 2}),
        (4, {CP: 2, PP: 2}),
        (4, {CP: 2, TP: 2, SP: True}),
        (4, {TP: 2, SP: True, PP: 2, "virtual_pipeline": 2}),
    ],
    "qwen3_moe": [(4, {EP: 2})],
    "gpt2": [(2, {TP: 2, SP: True})],
    "mistral": [(2, {TP: 2})],
}
"""Further combinations; ranks that no option names are data parallel."""
PlainLoss = Callable[[PreTrainedModel, str, TrainBatch], tuple[dict[str, torch.Tensor], torch.Tensor]]
CASES = [(family, world, options) for family, layouts in LAYOUTS.items() for world, options in layouts]


def _name(case: tuple[str, int, dict[str, Any]]) -> str:
    family, world, options = case
    return f"{family}-{world}-" + "-".join(f"{key}{value}" for key, value in options.items())


def _jobs(
    cases: list[tuple[str, int, dict[str, Any]]],
    of_heads: dict[str, Any],
    model_of: Callable[[str], str],
    exports: Path,
) -> dict[str, Any]:
    jobs: dict[str, Any] = {
        _name(case): {"model": model_of(case[0]), "world": case[1], "options": case[2]} for case in cases
    }
    for head in ("value", "reward"):
        jobs[head] = {"model": model_of("qwen3"), "world": 2, "options": of_heads, "head": head}
    for name, job in jobs.items():
        job["export"] = str(exports / name)
    return jobs


@pytest.fixture(scope="module")
def answers(
    run_jobs: Callable[..., Any],
    model_of: Callable[[str], str],
    batch: TrainBatch,
    exports: Path,
) -> Any:
    jobs = _jobs(CASES, {TP: 2, SP: True}, model_of, exports)
    # An update with most tokens dropped by full experts.
    jobs["capacity"] = {"model": model_of("qwen3_moe"), "engine": {"moe_expert_capacity_factor": 0.1}}
    return run_jobs(jobs, batch, exports / "jobs")


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each job exports its model, under its name."""
    return tmp_path_factory.mktemp("parity")


def plain(
    path: str, head: str, batch: TrainBatch, plain_loss: PlainLoss
) -> tuple[dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    """Outputs [T] or [S], loss, and gradients by checkpoint name, from transformers on each sequence alone."""
    model: PreTrainedModel = load_model(path, head, attention="eager", seed=0)  # type: ignore[arg-type]
    outputs, total = plain_loss(model, head, batch)
    total.backward()
    layout = checkpoint_layout(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for buffer in model.buffers():
            buffer.zero_()  # an update does not move it
    gradients = {name: tensor.clone() for name, tensor in checkpoint_tensors(model, layout)}
    return {name: value.detach() for name, value in outputs.items()}, float(total.detach()), gradients


def files_of(directory: Path | str) -> dict[str, torch.Tensor]:
    """The tensors of a model directory by name."""
    found: dict[str, torch.Tensor] = {}
    for file in Path(directory).glob("*.safetensors"):
        found |= load_file(file)
    return found


def check(
    answer: list[dict[str, Any]], path: str, head: str, batch: TrainBatch, exported: Path, plain_loss: PlainLoss
) -> None:
    files = files_of(path)
    for rank in answer:
        assert set(rank["before"]) - {"score.weight", "score.bias"} <= set(files) <= {*rank["before"], "lm_head.weight"}
        for name, tensor in rank["before"].items():
            assert name not in files or torch.equal(tensor, files[name]), f"{name} is not what was read"
        # Rows that pad the vocabulary and a new head are held and not read; a bias of experts is read into a buffer.
        assert rank["held"] - 2 * 64 <= rank["read"] <= rank["held"] + 4 * 8, "a rank reads what it holds"
    written = files_of(exported)
    assert set(written) == set(answer[0]["after"])
    assert all(torch.equal(tensor, answer[0]["after"][name]) for name, tensor in written.items())
    outputs, loss, gradients = plain(path, head, batch, plain_loss)
    bounds = batch.cu_seqlens.tolist()
    for rank in answer:
        for name, expected in outputs.items():
            parts = [
                expected[i : i + 1] if name == "scores" else expected[bounds[i] : bounds[i + 1]] for i in rank["own"]
            ]
            torch.testing.assert_close(rank["computed"][name], torch.cat(parts), rtol=1e-4, atol=1e-4)
    assert sum(rank["metrics"][0].get("loss", 0.0) for rank in answer) == pytest.approx(loss, rel=1e-5, abs=1e-5)
    norms = [rank["metrics"][0]["grad_norm"] for rank in answer if "grad_norm" in rank["metrics"][0]]
    assert norms == [pytest.approx(math.sqrt(sum(float(g.norm()) ** 2 for g in gradients.values())), rel=1e-4)]
    # One step of SGD with learning rate 1 and no clipping: the weights differ by the gradient.
    moved = {name: answer[0]["before"][name] - answer[0]["after"][name] for name in gradients}
    for name, gradient in gradients.items():
        assert float((moved[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()) + 1e-6, name
    for rank in answer:
        for when in ("after", "again"):
            assert all(torch.equal(rank[when][name], answer[0]["after"][name]) for name in gradients)
        assert rank["offloaded_bytes"] == 0
    covered = {name: torch.full_like(tensor, math.nan) for name, tensor in answer[0]["after"].items()}
    for rank in answer:
        for name, _, box, _, tensor in rank["boxes"]:
            place = covered[name][tuple(slice(first, last) for first, last in box)]
            assert place.isnan().all(), f"{name}: a part is streamed twice"
            place.copy_(tensor)
    assert all(torch.equal(covered[name], answer[0]["after"][name]) for name in gradients)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_a_layout_equals_plain_transformers(
    case: tuple[str, int, dict[str, Any]],
    answers: Any,
    model_of: Callable[[str], str],
    batch: TrainBatch,
    exports: Path,
    plain_loss: PlainLoss,
) -> None:
    check(answers[_name(case)], model_of(case[0]), "lm", batch, exports / _name(case), plain_loss)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("head", ["value", "reward"])
def test_heads_equal_plain_transformers(
    head: str,
    answers: Any,
    model_of: Callable[[str], str],
    batch: TrainBatch,
    exports: Path,
    plain_loss: PlainLoss,
) -> None:
    check(answers[head], model_of("qwen3"), head, batch, exports / head, plain_loss)


@pytest.mark.engine
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_further_layouts_equal_plain_transformers(
    run_jobs: Callable[..., Any],
    model_of: Callable[[str], str],
    batch: TrainBatch,
    tmp_path: Path,
    plain_loss: PlainLoss,
) -> None:
    cases = [(family, world, options) for family, layouts in THOROUGH.items() for world, options in layouts]
    found = run_jobs(_jobs(cases, {PP: 2}, model_of, tmp_path), batch, tmp_path / "jobs")
    for name, family, head in [
        *((_name(case), case[0], "lm") for case in cases),
        *((head, "qwen3", head) for head in ("value", "reward")),
    ]:
        print(name)  # shown beside a failure
        check(found[name], model_of(family), head, batch, tmp_path / name, plain_loss)


@pytest.mark.engine
@pytest.mark.slow
def test_a_native_argument_has_an_effect(answers: Any) -> None:
    """Experts of small capacity drop tokens, which changes their logprobs."""
    [whole, dropping] = (
        answers[name][0]["computed"]["logprobs"] for name in ("qwen3_moe-2-expert_parallel2", "capacity")
    )
    assert float((whole - dropping[: len(whole)]).abs().max()) > 1e-2


ADAM = {"optimizer": "adamw", "learning_rate": 1e-3}
SAVED: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data": (2, {}),
    "split": (2, {TP: 2, SP: True}),
    "stages": (2, {PP: 2, "virtual_pipeline": 2}),
    "experts": (2, {EP: 2}),
}
RESHARDED = [
    ("one", "data"), ("data", "one"), ("data", "stages"), ("stages", "split"), ("split", "data"), ("one", "experts"),
    ("experts", "split"),
]  # fmt: skip


@pytest.mark.engine
@pytest.mark.slow
def test_checkpoints_resume_in_other_layouts(
    run_jobs: Callable[..., Any], model_of: Callable[[str], str], batch: TrainBatch, tmp_path: Path
) -> None:
    """Two updates, a checkpoint and a third update give the same weights in every layout; bit for bit in the same."""
    path = model_of("deepseek_v3")

    def job(name: str, **keys: Any) -> dict[str, Any]:
        return {"model": path, "world": SAVED[name][0], "options": ADAM | SAVED[name][1], **keys}

    jobs = {name: job(name, updates=2, save=str(tmp_path / name), more=1) for name in SAVED}
    pairs = [*((name, name) for name in SAVED), *RESHARDED]
    jobs |= {f"{saved}-{name}": job(name, load=str(tmp_path / saved)) for saved, name in pairs}
    found = run_jobs(jobs, batch, tmp_path / "jobs")
    start, expected = found["one"][0]["before"], found["one"][0]["after"]
    assert not torch.equal(start["model.norm.weight"], expected["model.norm.weight"])
    for saved, name in pairs:
        for rank in found[f"{saved}-{name}"]:
            for tensor_name, tensor in rank["after"].items():
                if saved == name:
                    same = found[name][0]["after"][tensor_name]
                    assert torch.equal(tensor, same), (
                        f"{name}: {tensor_name} is not bit for bit what it would have been"
                    )
                # Adam divides by the root of tiny second moments, which magnifies rounding in the last bit of a few.
                moved = float((expected[tensor_name] - start[tensor_name]).norm())
                apart = float((tensor - expected[tensor_name]).norm())
                assert apart <= 0.01 * moved, f"{saved} resumed as {name}: {tensor_name} is {apart:.1e} off {moved:.1e}"


@pytest.mark.engine
@pytest.mark.slow
def test_a_critic_resumes_bit_for_bit(
    run_jobs: Callable[..., Any], model_of: Callable[[str], str], batch: TrainBatch, tmp_path: Path
) -> None:
    common = {"model": model_of("qwen3"), "world": 2, "options": ADAM | {TP: 2, SP: True}, "head": "value"}
    saving = common | {"save": str(tmp_path / "saved"), "more": 1}
    found = run_jobs({"made": saving, "resumed": common | {"load": str(tmp_path / "saved")}}, batch, tmp_path / "jobs")
    for made, resumed in zip(found["made"], found["resumed"], strict=True):
        for name, tensor in made["after"].items():
            assert torch.equal(resumed["after"][name], tensor), name


@pytest.mark.engine
@pytest.mark.slow
def test_weights_are_gathered_while_the_next_forward_pass_computes(
    run_jobs: Callable[..., Any], model_of: Callable[[str], str], batch: TrainBatch, tmp_path: Path
) -> None:
    """Buckets of a few matrices each; the untied head is one of its own."""
    made = {"model": model_of("llama"), "world": 2, "updates": 2, "options": ADAM}
    late = {"options": ADAM | {"overlap": True}, "engine": {"ddp": {"bucket_size": 5000}}}
    found = run_jobs({"at once": made, "late": made | late}, batch, tmp_path / "jobs")
    for at_once, rank in zip(found["at once"], found["late"], strict=True):
        assert at_once["gathered_late"] == 0
        assert rank["gathered_late"] > 10, "a step leaves the other rank's shards to the next forward pass"
        assert rank["forced_gathers"] == 0, "nothing waits for all weights before a forward pass"
        for name, tensor in at_once["after"].items():
            assert torch.equal(rank["after"][name], tensor), name


@pytest.mark.engine
@pytest.mark.slow
def test_bfloat16_computes_with_copies_of_float32_weights(
    run_jobs: Callable[..., Any],
    model_of: Callable[[str], str],
    batch: TrainBatch,
    tmp_path: Path,
    plain_loss: PlainLoss,
) -> None:
    half = ADAM | {"param_dtype": "bfloat16"}
    layouts: dict[str, tuple[str, int, dict[str, Any]]] = {
        "one": ("qwen3", 1, {}),
        "split": ("qwen3", 2, {TP: 2, SP: True}),
        "experts": ("qwen3_moe", 2, {EP: 2}),
    }
    jobs: dict[str, Any] = {}
    for name, (family, world, options) in layouts.items():
        common = {"model": model_of(family), "world": world, "options": half | options}
        jobs[name] = common | {"updates": 2, "save": str(tmp_path / name), "more": 1}
        jobs[f"{name}-resumed"] = common | {"load": str(tmp_path / name)}
    found = run_jobs(jobs, batch, tmp_path / "jobs")
    for name, (family, _, _) in layouts.items():
        gradients = plain(model_of(family), "lm", batch, plain_loss)[2]
        exact = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in gradients.values()))
        [norm] = [rank["metrics"][0]["grad_norm"] for rank in found[name] if "grad_norm" in rank["metrics"][0]]
        assert norm == pytest.approx(exact, rel=0.05)
        assert norm != pytest.approx(exact, rel=1e-5), "in float32 it would be equal"
        for rank, resumed in zip(found[name], found[f"{name}-resumed"], strict=True):
            assert {tensor.dtype for tensor in rank["after"].values()} == {torch.bfloat16}
            assert rank["master_dtypes"] == {torch.float32}
            for tensor_name, tensor in rank["after"].items():
                assert torch.equal(resumed["after"][tensor_name], tensor), tensor_name


@pytest.mark.engine
@pytest.mark.slow
def test_boxes_of_one_layout_are_taken_by_another(
    run_jobs: Callable[..., Any], model_of: Callable[[str], str], batch: TrainBatch, tmp_path: Path
) -> None:
    """A stream of parts from tensor parallel stages arrives bit for bit in context and data parallel ranks."""
    path = model_of("qwen3")
    sender = run_jobs({"sender": {"model": path, "world": 4, "options": {TP: 2, PP: 2}}}, batch, tmp_path / "sender")
    torch.save([entry for rank in sender["sender"] for entry in rank["boxes"]], tmp_path / "sent.pt")
    jobs = {
        "other": {"model": path, "world": 2, "options": {PP: 2}, "take": str(tmp_path / "sent.pt")},
        "split": {"model": path, "world": 2, "options": {TP: 2}, "take": str(tmp_path / "sent.pt")},
    }
    for ranks in run_jobs(jobs, batch, tmp_path / "receivers").values():
        for rank in ranks:
            for name, tensor in sender["sender"][0]["after"].items():
                assert torch.equal(rank["taken"][name], tensor), name
