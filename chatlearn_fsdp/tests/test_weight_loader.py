"""A trainer over several ranks that follows one of another layout: dense, a mixture of experts, under adapters."""

from __future__ import annotations

import pytest
import torch

from chatlearn_hf.tiny import build_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SLICES = {1: [[0, 1, 2, 3, 4, 5, 6]], 2: [[0, 1, 2, 3], [4, 5, 6]], 3: [[0, 1], [2, 3], [4, 5, 6]]}
DECAY = 0.75
LORA = {"lora": {"rank": 4}}
TENSOR = {"tensor_parallel": 2}


@pytest.fixture(scope="module")
def answers(run_jobs, seven_sequences, tmp_path_factory):
    """The senders' streams, and what followers of other layouts hold after they took them."""
    folder = tmp_path_factory.mktemp("following")
    models = {
        "dense": str(build_tiny_model(folder / "dense", "qwen3")),
        "mixture": str(build_tiny_model(folder / "mixture", "qwen3_moe")),
    }
    common = {"weights": True, "updates": 2}
    senders = {name: common | {"model": model, "slices": SLICES[2]} for name, model in models.items()}
    found = run_jobs(senders, seven_sequences, folder / "senders")
    jobs = {}
    for name, model in models.items():
        whole = [(n, tuple(t.shape), None, 0, t) for n, t in found[name][0]["full"].items()]
        boxes = [box for rank in found[name] for box in rank["boxes"]]
        for form, sent in (("tensors", whole), ("boxes", boxes[::-1])):
            file = folder / f"{name}-{form}.pt"
            torch.save(sent, file)
            for slices, decay, options in (
                (2, 0.0, {"dp_replicate": 2}),
                (3, DECAY, {}),
                (2, 0.0, LORA),
                (1, DECAY, {}),
                *([(1, 0.0, TENSOR), (2, DECAY, TENSOR)] if name == "dense" else []),
            ):
                kind = "-lora" if options == LORA else "-tensor" if options == TENSOR else ""
                label = f"{name}-{form}-{slices}-{decay}{kind}"
                take = {"file": str(file), "boxes": form == "boxes", "decay": decay}
                jobs[label] = common | {
                    "model": model,
                    "slices": SLICES[slices],
                    "options": options,
                    "take": take,
                    "updates": 1,
                }
    followers = run_jobs(jobs, seven_sequences, folder / "followers")
    return {name: ranks[0]["full"] for name, ranks in found.items()}, followers


@pytest.mark.parametrize("form", ["tensors", "boxes"])
@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, layout) for model in ("dense", "mixture") for layout in ("2-0.0", "3-0.75", "2-0.0-lora", "1-0.75")]
    + [("dense", "1-0.0-tensor"), ("dense", "2-0.75-tensor")],
)
def test_every_rank_holds_its_part_of_what_was_sent(answers, model: str, form: str, layout: str) -> None:
    senders, followers = answers
    ranks = followers[f"{model}-{form}-{layout}"]
    decay = float(layout.split("-")[1])
    for rank in ranks:
        assert rank["num_updates"] == 0, "the optimizer is new"
        assert rank["full"].keys() == senders[model].keys()
        for name, sent in senders[model].items():
            found = rank["full"][name]
            if decay:
                expected = decay * rank["before"][name].double() + (1 - decay) * sent.double()
                torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6, msg=name)
            else:
                assert torch.equal(found, sent), name
        assert any(not torch.equal(rank["before"][name], sent) for name, sent in senders[model].items())


def test_placing_takes_no_memory(answers) -> None:
    """Shards are written in place, and an average needs none either where dtypes are equal."""
    _, followers = answers
    for job, ranks in followers.items():
        largest = max(tensor.nbytes for tensor in ranks[0]["full"].values())
        limit = largest if "lora" in job else 0  # adapters are drawn anew, whole
        assert all(rank["largest_taken"] <= limit for rank in ranks), job
