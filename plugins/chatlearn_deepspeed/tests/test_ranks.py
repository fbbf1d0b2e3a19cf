"""Checkpoints, exports, refreshes, adapters and refused updates of two ranks."""

from __future__ import annotations

import pytest
import torch

from chatlearn_hf.model_directory import load_causal_lm
from chatlearn_hf.tiny import build_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EVERYTHING = [list(range(7))]
DP2 = [[0, 1, 2, 3], [4, 5, 6]]
BUCKET = 40_000
"""Bytes; larger than most tensors of the tiny model, and a fraction of all."""
LORA = {"lora": {"rank": 4, "alpha": 8.0}, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    build_tiny_model(root / "model", "qwen3")
    build_tiny_model(root / "other", "qwen3", seed=1)
    build_tiny_model(root / "mixture", "qwen3_moe")
    return root


@pytest.fixture(scope="module")
def answers(run_jobs, seven_sequences, paths):
    def job(stage, slices=DP2, **rest):
        chosen = {"zero_stage": stage, "learning_rate": 1e-3} | rest.pop("options", {})
        return {"model": str(paths / "model"), "slices": slices, "options": chosen} | rest

    saved = {stage: str(paths / f"saved{stage}") for stage in (2, 3)}
    jobs = {
        "save2": job(2, updates=2, save=saved[2], poison="s1"),
        "on2": job(2, updates=4),
        "resume2": job(2, updates=2, load=saved[2]),
        "save3": job(3, updates=2, save=saved[3], poison="s4", export=str(paths / "export"), memory=[BUCKET, 1 << 30]),
        "on3": job(3, updates=4),
        "resume3": job(3, updates=2, load=saved[3], take=0.25, load_model=str(paths / "other")),
        "resume3-on-one": job(1, EVERYTHING, updates=2, load=saved[3]),
        "bfloat16-2": job(2, options={"param_dtype": "bfloat16", "max_tokens_per_micro_batch": 64}),
        "bfloat16-3": job(3, options={"param_dtype": "bfloat16", "max_tokens_per_micro_batch": 64}),
        "value3": job(3, head="value"),
        "value-one": job(2, EVERYTHING, head="value"),
        "lora3": job(3, updates=2, options=LORA, save=str(paths / "adapters"), export=str(paths / "merged")),
        "lora-one": job(2, EVERYTHING, updates=2, options=LORA),
        "reference3": job(3, updates=0, trainable=False),
        "mixture3": job(3) | {"model": str(paths / "mixture")},
    }
    return run_jobs(jobs, seven_sequences, paths / "answers")


def assert_equal(ours, theirs) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_close(ours, theirs, atol) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=atol, rtol=0)


@pytest.mark.parametrize("stage", [2, 3])
def test_resuming_is_bit_identical(answers, stage) -> None:
    for resumed, straight in zip(answers[f"resume{stage}"], answers[f"on{stage}"], strict=True):
        assert_equal(resumed["weights"], straight["weights"])


def test_another_world_and_stage_resumes(answers) -> None:
    """Adam's moments and step count came along: without them the first step would be a hundred times as large."""
    assert_close(answers["resume3-on-one"][0]["weights"], answers["on3"][0]["weights"], atol=2e-5)


def test_a_bad_loss_on_one_rank_stops_both_and_changes_nothing(answers, paths) -> None:
    first, second = answers["save2"]
    assert "samples s0, s1, s2, s3" in first["error"]
    assert "on another rank" in second["error"]
    before = load_causal_lm(str(paths / "model")).state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in first["refused"].items())
    assert first["metrics"][0]["grad_norm"] == answers["on2"][0]["metrics"][0]["grad_norm"]
    assert "samples s4, s5, s6" in answers["save3"][1]["error"]
    norms = [[one["grad_norm"] for one in answers[job][0]["metrics"]] for job in ("save3", "on3")]
    assert norms[0] == norms[1][:2]


@pytest.mark.parametrize("stage", [2, 3])
def test_bfloat16_is_close_and_its_master_weights_are_float32(answers, stage) -> None:
    exact, [rank, _] = answers["on2"][0], answers[f"bfloat16-{stage}"]
    assert {tensor.dtype for tensor in rank["weights"].values()} == {torch.bfloat16}
    assert {values.dtype for _, _, _, values in rank["first_moments"]} == {torch.float32}
    assert rank["metrics"][0]["grad_norm"] == pytest.approx(exact["metrics"][0]["grad_norm"], rel=0.05)
    assert rank["metrics"][0]["grad_norm"] != exact["metrics"][0]["grad_norm"]


def test_gathering_is_bounded_by_buckets(answers) -> None:
    for rank in answers["save3"]:
        total = sum(tensor.nbytes for tensor in rank["weights"].values())
        largest = max(tensor.nbytes for tensor in rank["weights"].values())
        assert rank["gathered"][BUCKET] <= max(BUCKET, largest) < 0.7 * total
        assert rank["gathered"][1 << 30] >= 0.99 * total, "the measure sees what is gathered"
        assert rank["live_bytes"]["weights"] < 0.6 * total, "a half, and buffers"


@pytest.mark.parametrize("job", ["save2", "save3", "bfloat16-3", "lora3", "reference3", "mixture3"])
def test_boxes_of_all_ranks_cover_every_tensor_once(answers, job) -> None:
    """Nothing is gathered for them, save what is put together: experts, and weights with adapters."""
    ranks = answers[job]
    whole = ranks[0]["weights"]
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    for rank in ranks:
        assert rank["boxes"]
        for name, shape, box, tensor in rank["boxes"]:
            assert shape == tuple(whole[name].shape)
            place = found[name][tuple(slice(*side) for side in box)]
            assert bool(place.isnan().all()), f"{name}: a part is streamed twice"
            place.copy_(tensor)
            assert tensor.dtype == place.dtype
    assert_equal(found, whole)
    if job in ("save3", "bfloat16-3", "reference3"):
        assert all(rank["whole_for_boxes"] < 0.01 * sum(t.nbytes for t in whole.values()) for rank in ranks)
        halves = [sum(box[3].nbytes for box in rank["boxes"]) for rank in ranks]
        assert max(halves) < 0.55 * sum(halves)


def test_adapters_stream_under_the_names_of_peft(answers, paths) -> None:
    """They are what the merged weights differ by from the base: alpha / rank = 2 times B A."""
    before, [first, second] = _before(paths), answers["lora3"]
    assert_equal(first["adapter"], second["adapter"])
    names, config = first["adapter_manifest"]
    assert list(first["adapter"]) == names
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    adapted = [name.removesuffix(".lora_A.weight") for name in names if name.endswith(".lora_A.weight")]
    assert len(names) == 2 * len(adapted) > 0
    for module in adapted:
        weight = module.removeprefix("base_model.model.") + ".weight"
        up, down = (first["adapter"][f"{module}.lora_{side}.weight"] for side in "BA")
        assert up.abs().max() > 0
        torch.testing.assert_close(first["weights"][weight], before[weight] + 2 * up @ down, atol=1e-6, rtol=1e-5)


def test_offloading_frees_memory_and_brings_it_back(answers) -> None:
    for rank in answers["save3"]:
        assert rank["live_bytes"]["optimizer"] > 0
        assert rank["offloaded_bytes"] == [0, 0, 0]
        assert_equal(rank["again"], rank["weights"])


def test_the_export_is_a_model_directory(answers, paths) -> None:
    exported = load_causal_lm(str(paths / "export")).state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in answers["save3"][0]["weights"].items())


def test_a_refresh_by_boxes_is_averaged_on_every_rank(answers) -> None:
    """0.25 x + 0.75 (2 x)."""
    for rank in answers["resume3"]:
        expected = {name: 1.75 * tensor for name, tensor in rank["weights"].items()}
        assert_close(rank["taken"], expected, atol=1e-6)


def test_another_directory_is_averaged_in(answers, paths) -> None:
    other = load_causal_lm(str(paths / "other")).state_dict()
    for rank in answers["resume3"]:
        expected = {name: 0.5 * tensor + 0.5 * other[name] for name, tensor in rank["taken"].items()}
        assert_close(rank["loaded"], expected, atol=1e-6)


def test_a_value_head_learns_the_same(answers) -> None:
    ranks, (one,) = answers["value3"], answers["value-one"]
    norm = one["metrics"][0]["grad_norm"]
    assert ranks[0]["metrics"][0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert_close(ranks[0]["weights"], one["weights"], atol=2e-5)


def test_adapters_are_merged_and_saved_alone(answers, paths) -> None:
    ranks, (one,) = answers["lora3"], answers["lora-one"]
    assert ranks[0]["metrics"][1]["grad_norm"] == pytest.approx(one["metrics"][1]["grad_norm"], rel=1e-3)
    changed = [name for name, tensor in one["weights"].items() if not torch.equal(tensor, _before(paths)[name])]
    assert any(name.endswith("q_proj.weight") for name in changed)
    assert_close(ranks[1]["weights"], one["weights"], atol=1e-4)
    exported = load_causal_lm(str(paths / "merged")).state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in ranks[0]["weights"].items())
    size = sum(file.stat().st_size for file in (paths / "adapters").iterdir())
    assert size < 0.5 * sum(tensor.nbytes for tensor in one["weights"].values())


def _before(paths):
    return load_causal_lm(str(paths / "model")).state_dict()


def test_a_role_that_does_not_learn_is_sharded_too(answers) -> None:
    for mine, learning in zip(answers["reference3"], answers["on3"], strict=True):
        torch.testing.assert_close(mine["computed"]["logprobs"], learning["computed"]["logprobs"], atol=1e-6, rtol=0)
