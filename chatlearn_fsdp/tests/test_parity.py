"""One batch gives the same loss, gradient norm and per-parameter gradients however the work is spread over ranks.

The reference is one rank, whose gradients ``test_trainer.py`` compares with a loop of plain transformers forwards.
"""

from __future__ import annotations

import pytest
import torch

from chatlearn_core.types import OutputRequest, TrainBatch
from chatlearn_hf.model_directory import load_causal_lm
from chatlearn_hf.packed_forward import PackedModel, packed_outputs
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_hf.tiny_architectures import build_tiny

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EVERYTHING = [list(range(7))]
# (slices of the seven sequences, sizes); uneven on purpose, one of them empty.
LAYOUTS = {
    "dp2": ([[0, 1, 2, 3, 4, 5], [6]], {}),
    "dp4": ([[0, 1], [2, 3, 4], [5, 6], []], {}),
    "hsdp2x2": ([[0, 6], [1, 5], [2], [3, 4]], {"dp_replicate": 2}),
    "replicate2": ([[0, 1, 2, 3, 4, 5], [6]], {"dp_replicate": 2}),
    "ulysses2": (EVERYTHING, {"ulysses": 2}),
    "ulysses4_of_2_kv_heads": (EVERYTHING, {"ulysses": 4}),
    "ring2": (EVERYTHING, {"ring": 2}),
    "ring3": (EVERYTHING, {"ring": 3}),
    "dp2_ring2": ([[0, 1, 2], [3, 4, 5, 6]], {"ring": 2}),
    "dp2_ulysses2": ([[0, 1, 2], [3, 4, 5, 6]], {"ulysses": 2}),
    "tp2": (EVERYTHING, {"tensor_parallel": 2}),
    "dp2_tp2": ([[0, 1, 2], [3, 4, 5, 6]], {"tensor_parallel": 2}),
    "replicate2_tp2": ([[0, 1, 2, 3, 4, 5, 6], []], {"dp_replicate": 2, "tensor_parallel": 2}),
    "replicate2_ulysses2": ([[0, 1, 2, 3, 4, 5, 6], []], {"dp_replicate": 2, "ulysses": 2}),
}
VARIANTS = {
    "packed": {},
    "unpacked": {"max_tokens_per_micro_batch": 1},
    "offload": {"cpu_offload": True, "max_tokens_per_micro_batch": 64},
    "checkpointing": {"gradient_checkpointing": True, "logits_chunk_tokens": 16},
}
CLIP = 0.01
"""A limit far below the gradient norm."""
ORDINARY = ("dp2", "dp2_ulysses2", "hsdp2x2", "tp2")
"""Layouts that are tested in every variant; the others only packed, and all of them with ``-m matrix``."""
MIXTURE = {
    "one_eager": (EVERYTHING, {"experts": "eager"}),
    "dp2_grouped": (LAYOUTS["dp2"][0], {"experts": "grouped_mm"}),
    "dp2_eager": (LAYOUTS["dp2"][0], {"experts": "eager"}),
    "ulysses2": (EVERYTHING, {"ulysses": 2}),
    "hsdp2x2": LAYOUTS["hsdp2x2"],
}
HEADS = {"dp2": LAYOUTS["dp2"], "ulysses2": LAYOUTS["ulysses2"], "ring2": LAYOUTS["ring2"], "tp2": LAYOUTS["tp2"]}
# Sinks and value heads of another size are split over heads, and soft caps and windows in a ring; padded sequences over
# slices; StableLM raises inside its
# first comparison, while layers are gathered; GPT-2 keeps its layers under another name.
FAMILIES = {
    "gpt_oss": ["dp2", "ulysses2", "ring2"],
    "deepseek_v3": ["ulysses2", "ring2"],
    "gemma2": ["ring3"],
    "qwen3_next": ["dp2", "dp4"],
    "stablelm": ["dp2"],
    "gpt2": ["dp2"],
    "llama": ["tp2"],
    "mistral": ["tp2"],
    "qwen2": ["dp2_tp2"],
}
LORA = {"lora": {"rank": 4, "alpha": 8.0}}
# The budget cuts the first slice into several micro-batches, the second into fewer.
ZERO = {
    f"zero{stage}_{layout}": (LAYOUTS[layout][0], LAYOUTS[layout][1] | {"zero_stage": stage})
    for stage, layout in (
        (3, "dp2"),
        (2, "dp2"),
        (1, "dp2"),
        (0, "dp2"),
        (1, "hsdp2x2"),
        (2, "ulysses2"),
        (0, "ulysses2"),
        (3, "tp2"),
        (1, "dp2_tp2"),
        (0, "dp2_tp2"),
    )
}


def sharing_of(sizes):
    """How many ranks share a slice."""
    return sizes.get("ulysses", 1) * sizes.get("ring", 1) * sizes.get("tensor_parallel", 1)


def layouts_and_variants():
    for layout in LAYOUTS:
        for variant in VARIANTS:
            marks = () if variant == "packed" or layout in ORDINARY else (pytest.mark.matrix,)
            yield pytest.param(layout, variant, marks=marks, id=f"{layout}-{variant}")


@pytest.fixture(scope="module")
def answers(request, run_jobs, seven_sequences, tmp_path_factory):
    root = tmp_path_factory.mktemp("fsdp-parity")
    dense = str(build_tiny_model(root / "dense", "qwen3", tie=False))
    tied = str(build_tiny_model(root / "tied", "qwen3"))
    mixture = str(build_tiny_model(root / "mixture", "qwen3_moe"))
    jobs = {"one": {"model": dense, "slices": EVERYTHING}}
    collected = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and "variant" in item.fixturenames
    ]
    for layout, variant in ((params["layout"], params["variant"]) for params in collected):
        slices, sizes = LAYOUTS[layout]
        jobs[f"{layout}-{variant}"] = {"model": dense, "slices": slices, "options": sizes | VARIANTS[variant]}
    jobs["mixture-one"] = {"model": mixture, "slices": EVERYTHING}
    for layout, (slices, sizes) in MIXTURE.items():
        jobs[f"mixture-{layout}"] = {"model": mixture, "slices": slices, "options": sizes, "weights": True}
    for head in ("value", "reward"):
        jobs[f"{head}-one"] = {"model": tied, "slices": EVERYTHING, "head": head}
        for layout, (slices, sizes) in HEADS.items():
            jobs[f"{head}-{layout}"] = {"model": tied, "slices": slices, "options": sizes, "head": head}
    for family, layouts in FAMILIES.items():
        path = str(root / family)
        build_tiny(family, vocab_size=320).save_pretrained(path)
        for layout in ("one", *layouts):
            slices, sizes = LAYOUTS.get(layout, (EVERYTHING, {}))
            options = sizes | {"max_tokens_per_micro_batch": 80}
            jobs[f"{family}-{layout}"] = {"model": path, "slices": slices, "options": options}
    biased = str(build_tiny_model(root / "biased", "qwen3", attention_bias=True))
    jobs["biased-one"] = {"model": biased, "slices": EVERYTHING}
    jobs["biased-tp2"] = {"model": biased, "slices": EVERYTHING, "options": {"tensor_parallel": 2}}
    jobs["tied-one"] = {"model": tied, "slices": EVERYTHING}
    jobs["tied-dp2"] = {"model": tied, "slices": LAYOUTS["dp2"][0]}
    jobs["tied-tp2"] = {"model": tied, "slices": EVERYTHING, "options": {"tensor_parallel": 2}}
    clipped = {"grad_clip": CLIP, "optimizer": "sgd", "learning_rate": 1.0}
    for layout in ("one", "dp2", "dp2_tp2"):
        slices, sizes = LAYOUTS.get(layout, (EVERYTHING, {}))
        job = {"model": dense, "updates": 3, "weights": True}
        jobs[f"clipped-{layout}"] = job | {"slices": slices, "options": clipped | sizes}
    jobs["bfloat16-dp2"] = {"model": tied, "slices": LAYOUTS["dp2"][0], "options": {"param_dtype": "bfloat16"}}
    five = {"model": dense, "updates": 5, "weights": True}
    jobs["five-one"] = five | {"slices": EVERYTHING}
    for layout, (slices, sizes) in ZERO.items():
        options = sizes | {"max_tokens_per_micro_batch": 64}
        jobs[layout] = five | {"slices": slices, "options": options}
    options = {"param_dtype": "bfloat16", "zero_stage": 1, "max_tokens_per_micro_batch": 64}
    tensor = {"param_dtype": "bfloat16", "tensor_parallel": 2}
    jobs["bfloat16-tp2"] = {"model": tied, "slices": EVERYTHING, "options": tensor}
    jobs["bfloat16-zero1"] = {"model": tied, "slices": LAYOUTS["dp2"][0], "options": options}
    # Where B is 0 the gradient of A is 0 too: look at the second update.
    jobs["lora-one"] = {"model": tied, "slices": EVERYTHING, "options": LORA, "updates": 2}
    for layout in ("dp2", "hsdp2x2", "ulysses2"):
        slices, sizes = LAYOUTS[layout]
        jobs[f"lora-{layout}"] = {
            "model": tied,
            "slices": slices,
            "options": sizes | LORA,
            "updates": 2,
            "weights": True,
            "export": str(root / f"lora-{layout}"),
        }
    return run_jobs(jobs, seven_sequences, root / "answers")


def assert_same_update(ranks, reference, *, relative=1e-4) -> None:
    metrics = [rank["metrics"] for rank in ranks if rank["metrics"]]
    assert sum(one["loss"] for one in metrics) == pytest.approx(reference["metrics"]["loss"], rel=1e-5)
    assert ranks[0]["metrics"]["grad_norm"] == pytest.approx(reference["metrics"]["grad_norm"], rel=relative)
    assert sum("grad_norm" in one for one in metrics) == 1
    gradients, expected = ranks[0]["gradients"], reference["gradients"]
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (gradients[name] - gradient).norm() <= relative * gradient.norm(), name


def assert_same_outputs(ranks, reference, slices, batch: TrainBatch, *, sharing: int = 1) -> None:
    for index, members in enumerate(slices):
        for rank in ranks[index * sharing : (index + 1) * sharing]:
            for name, values in rank["computed"].items():
                whole = reference["computed"][name]
                bounds = batch.cu_seqlens.tolist()
                parts = [whole[s : s + 1] if name == "scores" else whole[bounds[s] : bounds[s + 1]] for s in members]
                expected = torch.cat(parts) if parts else whole[:0]
                # Ranks add up float32 numbers in another order; processors differ in the last digits.
                torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("layout", "variant"), layouts_and_variants())
def test_any_layout_equals_one_rank(answers, seven_sequences, layout, variant) -> None:
    slices, sizes = LAYOUTS[layout]
    ranks = answers[f"{layout}-{variant}"]
    assert_same_update(ranks, answers["one"][0])
    assert_same_outputs(ranks, answers["one"][0], slices, seven_sequences, sharing=sharing_of(sizes))


@pytest.mark.parametrize("layout", ZERO)
def test_any_zero_stage_equals_one_rank(answers, seven_sequences, layout) -> None:
    slices, sizes = ZERO[layout]
    ranks, reference = answers[layout], answers["five-one"][0]
    assert_same_update([rank["first"] for rank in ranks], reference["first"])
    assert_same_outputs(ranks, reference, slices, seven_sequences, sharing=sharing_of(sizes))
    assert ranks[0]["metrics"]["grad_norm"] == pytest.approx(reference["metrics"]["grad_norm"], rel=1e-3), "the fifth"
    for name, weight in reference["full"].items():
        assert (ranks[0]["full"][name] - weight).norm() <= 1e-4 * weight.norm(), name
    assert_boxes_cover(ranks)


def test_each_zero_stage_communicates_as_it_says(answers) -> None:
    """Three units (two layers and the rest) and two micro-batches. Stage 3 gathers layers for forward and for backward;
    stage 2 gathers everything once, stage 1 reduces once, too. All reduce three numbers: micro-batches, norm, and
    whether everything is finite.
    """
    for stage, gathered, scattered, reduced in ((3, 10, 6, 3), (2, 3, 6, 3), (1, 3, 3, 3), (0, 0, 0, 6)):
        done = answers[f"zero{stage}_dp2"][0]["communication"]
        found = (done["_allgather_base_"], done["_reduce_scatter_base_"], done["allreduce_"])
        assert found == (gathered, scattered, reduced), (stage, done)
    # Tensor parallel ranks also reduce the gradients of their copies, all at once.
    assert answers["zero3_tp2"][0]["communication"]["allreduce_"] == 4


def test_between_steps_every_sharding_stage_holds_shards_only(answers) -> None:
    whole = sum(tensor.nbytes for tensor in answers["five-one"][0]["full"].values())
    for stage, limit in ((3, 0.6), (2, 0.6), (1, 0.6), (0, 1.1)):
        for rank in answers[f"zero{stage}_dp2"]:
            assert limit / 2 * whole < rank["live_bytes"] < limit * whole
            assert rank["offloaded_bytes"] == 0


@pytest.mark.parametrize("stage", ["zero3_tp2", "zero1_dp2_tp2", "zero0_dp2_tp2"])
def test_copies_of_tensor_parallel_ranks_stay_equal(answers, stage) -> None:
    """Every rank gathers from its own part of the ranks; what is whole on several must not drift apart."""
    first, *others = answers[stage]
    for rank in others:
        assert all(torch.equal(rank["full"][name], tensor) for name, tensor in first["full"].items())


def test_tensor_parallel_ranks_hold_their_part_of_the_weights(answers) -> None:
    whole = sum(tensor.nbytes for tensor in answers["five-one"][0]["full"].values())
    for rank in answers["zero3_tp2"]:
        assert 0.45 * whole < rank["live_bytes"] < 0.6 * whole, "half, norms and buffers"
    for rank in answers["zero1_dp2_tp2"]:
        assert 0.2 * whole < rank["live_bytes"] < 0.35 * whole


def test_shared_prompts_of_split_groups(run_jobs, grouped_sequences, tmp_path) -> None:
    """Two slices that tear a group, the second with fewer micro-batches, against prompts computed apart."""
    model = str(build_tiny_model(tmp_path / "model", "qwen3", tie=False))
    slices = [list(range(11)), [11]]
    budget = {"max_tokens_per_micro_batch": 100}
    jobs = {
        "one": {"model": model, "slices": [list(range(12))], "options": {"share_prompts": False}},
        "dp2": {"model": model, "slices": slices, "options": budget},
        "tp2": {"model": model, "slices": [list(range(12))], "options": budget | {"tensor_parallel": 2}},
    }
    answers = run_jobs(jobs, grouped_sequences, tmp_path / "answers")
    assert_same_update(answers["dp2"], answers["one"][0])
    assert_same_outputs(answers["dp2"], answers["one"][0], slices, grouped_sequences)
    assert_same_update(answers["tp2"], answers["one"][0])
    assert answers["tp2"][0]["metrics"]["perf/computed_tokens"] < answers["one"][0]["metrics"]["perf/computed_tokens"]
    first, second = (rank["metrics"] for rank in answers["dp2"])
    assert first["perf/computed_tokens"] < first["perf/tokens"]
    assert first["perf/micro_batches"] > second["perf/micro_batches"]


@pytest.mark.parametrize("layout", MIXTURE)
def test_a_mixture_of_experts_too(answers, layout) -> None:
    ranks = answers[f"mixture-{layout}"]
    assert_same_update(ranks, answers["mixture-one"][0])
    assert_boxes_cover(ranks)


@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("head", ["value", "reward"])
def test_other_heads_too(answers, seven_sequences, head, layout) -> None:
    slices, sizes = HEADS[layout]
    ranks, reference = answers[f"{head}-{layout}"], answers[f"{head}-one"][0]
    assert_same_update(ranks, reference)
    assert_same_outputs(ranks, reference, slices, seven_sequences, sharing=sharing_of(sizes))


@pytest.mark.parametrize(("family", "layout"), [(name, layout) for name, all_ in FAMILIES.items() for layout in all_])
def test_other_families_too(answers, seven_sequences, family, layout) -> None:
    slices, sizes = LAYOUTS[layout]
    ranks, reference = answers[f"{family}-{layout}"], answers[f"{family}-one"][0]
    assert_same_update(ranks, reference)
    assert_same_outputs(ranks, reference, slices, seven_sequences, sharing=sharing_of(sizes))


def test_ulysses_of_a_model_whose_rows_cannot_be_packed_is_refused(run_jobs, seven_sequences, tmp_path, capfd) -> None:
    build_tiny("qwen3_next", vocab_size=320).save_pretrained(tmp_path / "model")
    job = {"model": str(tmp_path / "model"), "slices": EVERYTHING, "options": {"ulysses": 2}}
    with pytest.raises(AssertionError, match="a rank failed"):
        run_jobs({"one": job}, seven_sequences, tmp_path / "answers")
    error = capfd.readouterr().err
    assert "its layers carry a state from one sequence of a row to the next" in error
    assert "Correct for this model: with ulysses 1 and ring 1, attention sdpa, sequences padded" in error


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_tied_weights_stay_one(answers, layout) -> None:
    assert_same_update(answers[f"tied-{layout}"], answers["tied-one"][0])


def test_biases_before_and_after_attention_are_split_or_added_once(answers) -> None:
    assert_same_update(answers["biased-tp2"], answers["biased-one"][0])


@pytest.mark.parametrize("layout", ["dp2", "dp2_tp2"])
def test_gradients_are_clipped_over_all_ranks(answers, layout) -> None:
    """Parts of layers and whole tensors are on different meshes; all are scaled alike."""
    [one], ranks = answers["clipped-one"], answers[f"clipped-{layout}"]
    assert one["first"]["metrics"]["grad_norm"] > 2 * CLIP, "the limit matters"
    for rank in ranks:
        for name, weight in one["full"].items():
            torch.testing.assert_close(rank["full"][name], weight, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("job", ["bfloat16-dp2", "bfloat16-zero1", "bfloat16-tp2"])
def test_bfloat16_is_close_and_reduced_in_float32(answers, job) -> None:
    ours, exact = answers[job][0]["gradients"], answers["tied-one"][0]["gradients"]
    for name, gradient in exact.items():
        assert ours[name].dtype == torch.float32
        assert 0 < (ours[name] - gradient).norm() < 0.1 * gradient.norm(), name


@pytest.mark.parametrize("layout", ["dp2", "hsdp2x2", "ulysses2"])
def test_adapters_too_and_they_leave_merged(answers, seven_sequences, layout, tmp_path_factory) -> None:
    ranks, reference = answers[f"lora-{layout}"], answers["lora-one"][0]
    assert all(".lora_" in name for name in reference["gradients"])
    # Adam's first step divides gradients by themselves, which magnifies rounding.
    assert_same_update(ranks, reference, relative=1e-3)
    assert_boxes_cover(ranks)
    exported = tmp_path_factory.getbasetemp() / "fsdp-parity0" / f"lora-{layout}"
    slices = LAYOUTS[layout][0]
    with torch.no_grad():
        model = PackedModel(load_causal_lm(str(exported)))
        outputs = packed_outputs(model, seven_sequences.select(slices[0]), OutputRequest(frozenset({"logprobs"}), 0.7))
    torch.testing.assert_close(ranks[0]["computed_after"]["logprobs"], outputs["logprobs"], atol=1e-5, rtol=0)
    assert (ranks[0]["computed"]["logprobs"] - outputs["logprobs"]).abs().max() > 1e-4


def assert_boxes_cover(ranks) -> None:
    """Over all ranks the boxes hold each element of the gathered tensors exactly once."""
    full = ranks[0]["full"]
    count = {name: torch.zeros(tensor.shape) for name, tensor in full.items()}
    for owner, rank in enumerate(ranks):
        for name, shape, box, owner_rank, tensor in rank["boxes"]:
            place = tuple(slice(*side) for side in box)
            assert owner_rank == owner
            assert tuple(shape) == tuple(full[name].shape)
            torch.testing.assert_close(full[name][place], tensor, atol=1e-7, rtol=0)
            count[name][place] += 1
    assert all(bool((seen == 1).all()) for seen in count.values())
