"""Every algorithm that learns from preferences, end to end on a tiny model: held-out pairs move the right way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.engine

TRAINER = {"kind": "trainer", "backend": "fsdp", "options": {"learning_rate": 0.003}}
FROZEN = {"kind": "trainer", "backend": "fsdp"}


@pytest.fixture
def pairs(tmp_path: Path) -> Callable[[int, int], str]:
    """Writes pairs number start to stop: polite answers are chosen, rude ones rejected."""

    def write(start: int, stop: int) -> str:
        file = tmp_path / f"pairs-{start}.jsonl"
        rows = [
            {"prompt": f"what is {i} plus {i + 1}?", "chosen": f"gladly: {2 * i + 1}", "rejected": f"go away, {i}!"}
            for i in range(start, stop)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return write


@pytest.fixture
def offline(recipe: Any, pairs: Callable[[int, int], str]) -> Callable[..., Any]:
    """Writes the configuration of an algorithm on pairs, with others held out."""

    def write(name: str, roles: dict[str, Any], options: dict[str, Any] | None = None, steps: int = 4) -> Any:
        recipe.content |= {
            "data": {
                "train": [{"path": pairs(0, 12), "format": "preference"}],
                "eval": [{"path": pairs(12, 18), "format": "preference"}],
            },
            "algorithm": {"name": name, "options": options or {}},
            "roles": roles,
            "train": {"steps": steps, "prompts_per_step": 6, "mini_batches": 2},
        }
        del recipe.content["sampling"]
        recipe.write()
        return recipe

    return write


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics of the steps, without those of the evaluation before the first."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["step"]]


@pytest.mark.parametrize(
    ("name", "roles", "options"),
    [
        ("dpo", {"trainer": TRAINER, "reference": FROZEN}, {"label_smoothing": 0.05}),
        ("ipo", {"trainer": TRAINER, "reference": FROZEN}, {"token_means": True}),
        ("simpo", {"trainer": TRAINER}, {}),
        ("orpo", {"trainer": TRAINER}, {"odds_ratio_coef": 1.0}),
        ("reward_model", {"trainer": TRAINER | {"head": "reward"}}, {"centring_coef": 0.01}),
    ],
)
def test_held_out_pairs_move_apart(offline: Any, chatlearn: Any, name: str, roles: Any, options: Any) -> None:
    recipe = offline(name, roles, options)
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    summary = json.loads((recipe.run_dir / "summary.json").read_text())
    margin, loss = summary["eval/margin"], summary["eval/loss"]
    assert margin["after"] > margin["before"] + 1e-3
    assert loss["after"] < loss["before"] - 1e-3
    assert summary["eval/accuracy"]["after"] >= summary["eval/accuracy"]["before"]
    steps = lines(recipe.run_dir)
    assert [line["samples/trained"] for line in steps] == [12] * 4
    assert (recipe.run_dir / "model" / "model.safetensors").is_file()
    if "reference" in roles:
        assert margin["before"] == pytest.approx(0.0, abs=1e-5)  # the policy is the reference
    if name == "reward_model":
        assert "score.weight" in load_file(recipe.run_dir / "model" / "model.safetensors")


def test_kto_moves_good_and_bad_completions_apart(offline: Any, chatlearn: Any) -> None:
    """Mismatched pairs, too, are kept: the reference is closed before the run, which measures as one that keeps it."""
    recipe = offline("kto", {"trainer": TRAINER, "reference": FROZEN}, {"reference_point": "mismatched"})
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    [note] = [event["note"] for event in events(recipe.run_dir) if event["event"] == "output_cache"]
    assert note.endswith("closed")
    trace = [json.loads(line) for line in (recipe.run_dir / "trace.jsonl").read_text().splitlines()]
    actions = {entry["action"] for entry in trace if entry.get("role") == "reference"}
    assert actions == {"read_logprobs", "read_mismatched_logprobs"}
    elsewhere = recipe.file.parent / "resident"
    changes = ["algorithm.options.cache_reference=false", "train.steps=3", f"output_dir={elsewhere}"]
    resident = chatlearn("run", recipe.file, *changes)
    assert resident.code == 0, resident.output
    assert not (elsewhere / "output_cache.sqlite3").exists()
    for kept, computed in zip(lines(recipe.run_dir), lines(elsewhere), strict=False):
        for name in ("kto/reference_point", "policy/loss", "policy/grad_norm"):
            assert kept[name] == pytest.approx(computed[name], rel=1e-4, abs=1e-6)
    summary = json.loads((recipe.run_dir / "summary.json").read_text())
    good, bad = summary["eval/desirable_score"], summary["eval/undesirable_score"]
    assert good["before"] == pytest.approx(0.0, abs=1e-5)
    assert good["after"] - bad["after"] > good["before"] - bad["before"] + 1e-3
    assert summary["eval/loss"]["after"] < summary["eval/loss"]["before"]
    first, *_, last = lines(recipe.run_dir)
    assert first["kto/reference_point"] == pytest.approx(0.0, abs=1e-5)
    assert (last["kto/reference_point"] > 0, last["kto/desirable"]) == (True, 0.5)


@pytest.mark.parametrize(
    ("name", "options", "roles"),
    [
        ("online_dpo", {"group_size": 3}, {"reference": FROZEN}),
        ("online_dpo", {"group_size": 2, "loss": "ipo", "pairing": "all"}, {"reference": FROZEN}),
        ("rejection_sampling", {"group_size": 3}, {}),
    ],
)
def test_sampled_completions_are_ranked_and_learned(recipe: Any, chatlearn: Any, name: Any, options: Any, roles: Any):
    recipe.content["algorithm"] = {"name": name, "options": options}
    recipe.content["roles"] = {
        "trainer": TRAINER,
        "generator": {"kind": "generator", "backend": "transformers"},
        "reward": {"kind": "reward", "backend": "letters"},
        **roles,
    }
    recipe.content["train"] = {"steps": 2, "prompts_per_step": 4}
    recipe.write()
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    for line in lines(recipe.run_dir):
        kept = 1 if name == "rejection_sampling" else 2
        assert line["samples/trained"] + line["samples/excluded"] == 4 * options["group_size"]
        assert 0 < line["samples/trained"] <= 4 * kept
        reasons = {key.rpartition("/")[2] for key in line if key.startswith("samples/excluded/")}
        tokens = {reason: line[f"rollout/discarded_tokens/{reason}"] for reason in reasons}
        assert sum(tokens.values()) == line.get("rollout/discarded_tokens", 0)
        assert line["policy/grad_norm"] > 0


@pytest.mark.parametrize(
    ("roles", "name", "message"),
    [
        ({"trainer": TRAINER}, "dpo", "reference"),
        ({"trainer": TRAINER}, "reward_model", "roles.trainer.head is 'lm'"),
    ],
)
def test_roles_that_do_not_fit_are_refused(offline: Any, chatlearn: Any, roles: Any, name: str, message: str) -> None:
    refused = chatlearn("config", "validate", offline(name, roles).file)
    assert refused.code == 2, refused.output
    assert message in refused.output


def test_rows_with_equal_sides_end_the_run_or_are_counted(offline: Any, chatlearn: Any) -> None:
    recipe = offline("simpo", {"trainer": TRAINER}, steps=1)
    data = Path(recipe.content["data"]["train"][0]["path"])
    with data.open("a") as stream:
        stream.write(json.dumps({"prompt": "what?", "chosen": "same", "rejected": "same"}) + "\n")
    refused = chatlearn("run", recipe.file)
    assert refused.code == 2, refused.output
    assert "1 of 13 rows" in refused.output
    assert "completions 0 and 1 are equal, but their ranks differ" in refused.output
    accepted = chatlearn("run", recipe.file, "data.on_bad_row=skip")
    assert accepted.code == 0, accepted.output
    assert "completions 0 and 1 are equal" in accepted.output


def test_eval_compares_the_trained_model_with_the_reference_of_the_run(offline: Any, chatlearn: Any) -> None:
    """A frozen role without a model of its own keeps the run's model, not the evaluated one."""
    recipe = offline("dpo", {"trainer": TRAINER, "reference": FROZEN}, steps=2)
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    measured = {key: value for key, value in lines(recipe.run_dir)[-1].items() if key.startswith("eval/")}
    assert measured["eval/margin"] > 1e-3, "the policy is no longer the reference"

    model = recipe.run_dir / "model"
    evaluated = chatlearn("eval", recipe.file, "--checkpoints", "all", "--model", model)
    assert evaluated.code == 0, evaluated.output
    results = json.loads((recipe.run_dir / "evaluation" / "metrics.json").read_text())["evaluations"]
    alone = chatlearn("eval", recipe.file, "--json")
    assert alone.code == 0, alone.output
    results.append({"metrics": json.loads(alone.output.splitlines()[-1])})
    assert results[-1]["metrics"].pop("model") == str(model)
    assert [one.get("step") for one in results[-3:]] == [2, None, None]
    for one in results[-3:]:
        assert one["metrics"] == pytest.approx(measured, rel=1e-5, abs=1e-6)


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def test_reference_logprobs_are_computed_once_and_the_reference_is_closed(offline: Any, chatlearn: Any) -> None:
    """A run that resumes does not start the reference; one that keeps it resident measures the same."""
    recipe = offline("dpo", {"trainer": TRAINER, "reference": FROZEN}, steps=2)
    first = chatlearn("run", recipe.file)
    assert first.code == 0, first.output
    resumed = chatlearn("run", recipe.file, "train.steps=3")
    assert resumed.code == 0, resumed.output
    notes = [event["note"] for event in events(recipe.run_dir) if event["event"] == "output_cache"]
    # 2 steps of 6 pairs are the whole of 12, and 6 are held out.
    assert [note.partition(",")[0] for note in notes] == [
        "role reference: computed 36 sequences",
        "role reference: everything that this run reads is in " + notes[1].partition(" is in ")[2].partition(",")[0],
    ]
    assert notes[1].endswith("not started")
    trace = [json.loads(line) for line in (recipe.run_dir / "trace.jsonl").read_text().splitlines()]
    assert {entry["action"] for entry in trace if entry.get("role") == "reference"} == {"read_logprobs"}
    resident = chatlearn(
        "run",
        recipe.file,
        "train.steps=3",
        "algorithm.options.cache_reference=false",
        f"output_dir={recipe.file.parent / 'resident'}",
    )
    assert resident.code == 0, resident.output
    assert not (recipe.file.parent / "resident" / "output_cache.sqlite3").exists()
    cached, plain = lines(recipe.run_dir), lines(recipe.file.parent / "resident")
    assert [line["step"] for line in cached] == [1, 2, 3]
    for name in ("policy/margin", "policy/loss", "policy/grad_norm"):
        assert [line[name] for line in cached] == pytest.approx([line[name] for line in plain], rel=1e-4, abs=1e-6)


def test_a_reference_that_changes_is_not_kept(offline: Any, chatlearn: Any) -> None:
    follows = FROZEN | {"refresh": {"role": "trainer", "every": 1}}
    recipe = offline("dpo", {"trainer": TRAINER, "reference": follows})
    refused = chatlearn("config", "validate", recipe.file)
    assert refused.code == 2, refused.output
    assert "the weights of role 'reference' change in this run" in refused.output
    assert chatlearn("config", "validate", recipe.file, "algorithm.options.cache_reference=false").code == 0


@pytest.mark.parametrize(
    ("divergence", "match"),
    [("sampled_reverse_kl", "tokens"), ("sampled_reverse_kl", "text"), ("forward_kl", "tokens"), ("jsd", "tokens")],
)
def test_a_student_is_taught_by_teachers_of_its_data_sources(
    recipe: Any, chatlearn: Any, tmp_path: Path, divergence: str, match: str
) -> None:
    """Two teachers with weights of their own, by text one with another vocabulary; rows of a third source are left out
    and counted.
    """
    from chatlearn_hf.tiny import build_character_tokenizer, build_tiny_model

    tokenizer = build_character_tokenizer() if match == "text" else None
    teacher = build_tiny_model(tmp_path / "teacher", hidden=32, intermediate=64, seed=7, tokenizer=tokenizer)
    data = tmp_path / "sources.jsonl"
    sources = ["maths", "code", "poems", "maths"] * 2
    rows = [{"prompt": f"say {i}", "data_source": source, "answer": "x"} for i, source in enumerate(sources)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe.content["data"]["train"] = [{"path": str(data), "format": "prompt"}]
    options = {"teachers": {"maths": ["maths"], "code": ["code"]}, "divergence": divergence, "top_k": 8}
    options["match"] = match
    recipe.content["algorithm"] = {"name": "distillation", "options": options}
    recipe.content["roles"] = {
        "trainer": TRAINER,
        "generator": {"kind": "generator", "backend": "transformers"},
        "maths": FROZEN | {"model": {"path": str(teacher)}},
        "code": FROZEN,
    }
    recipe.content["train"] = {"steps": 4, "prompts_per_step": 8}
    recipe.write()
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    steps = lines(recipe.run_dir)
    if match == "text":
        # A random student samples control tokens and bytes that are no text: in part of its tokens nothing is shared.
        assert all(0 < line["distillation/unmatched_tokens"] < 1 for line in steps)
        assert all(line["samples/trained"] + line["samples/excluded"] == 8 for line in steps)
        assert all(line["policy/grad_norm"] > 0 for line in steps)
        return
    assert [line["samples/trained"] for line in steps] == [6] * 4
    assert [line["samples/excluded"] for line in steps] == [2] * 4
    name = "distillation/reverse_kl" if divergence == "sampled_reverse_kl" else "policy/divergence"
    assert all(line["policy/grad_norm"] > 0 for line in steps)
    if divergence != "sampled_reverse_kl":  # whose own estimate is too noisy to fall in four steps
        assert steps[-1][name] < steps[0][name]
