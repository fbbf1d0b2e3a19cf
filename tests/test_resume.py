"""A run killed with SIGKILL at any moment and resumed ends bit-identical to one that was not."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """Results by configuration, computed once."""
    return {}


@pytest.fixture
def expected(undisturbed: dict[str, Any], recipe: Any, chatlearn: Any, result_of: Any) -> Any:
    """Files of a run that was not killed."""
    if not undisturbed:
        finished = chatlearn("run", recipe.file, f"output_dir={recipe.file.parent / 'undisturbed'}")
        assert finished.code == 0, finished.output
        undisturbed["result"] = result_of(recipe.file.parent / "undisturbed")
    result = undisturbed["result"]
    assert [line["step"] for line in result.metrics] == [1, 2, 3, 4]
    assert all(line["training/updates"] == 4 for line in result.metrics), "2 mini-batches x 2 epochs"
    assert any(line["policy/grad_norm"] > 0 for line in result.metrics), "something is learned"
    return result


@pytest.mark.parametrize(
    ("moment", "every"),
    [
        ("completion:30", 1),  # while step 3 generates: 12 samples a step
        ("rollout:3", 1),
        ("update begins:1", 1),  # the very first update
        ("update:10", 1),  # between two updates of step 3
        ("update:14", 2),  # step 4: step 3 is made once more
        ("synced:4", 1),  # the generators hold step 3's weights, its line is not written
        ("metrics:4", 1),  # the line is written, the checkpoint is not
        ("metrics:3", 2),  # a line without a checkpoint
        ("half a save:2", 1),  # half a file of the checkpoint is written
        ("half a save:2", 2),
        ("saved:1", 1),
        ("export:1", 1),  # the model directory is incomplete
        ("end completed:1", 1),  # everything is written
    ],
)
def test_killed_at_a_defined_moment(
    moment: str, every: int, recipe: Any, chatlearn: Any, result_of: Any, expected: Any
) -> None:
    settings = (f"checkpoint.every={every}",)
    killed = chatlearn("run", recipe.file, *settings, PROBE=moment)
    assert killed.code == KILLED, killed.output
    resumed = chatlearn("run", recipe.file, *settings)
    if moment.startswith("end completed"):
        assert resumed.code == 2
        assert "is complete: it made 4 of 4 steps" in resumed.output
    else:
        assert resumed.code == 0, resumed.output
    assert result_of(recipe.run_dir) == expected
    left = [path.name for path in (recipe.run_dir / "checkpoints").iterdir() if path.name.startswith(".")]
    assert left == [], "nothing unfinished is left"


def test_killed_while_it_trains_beside_the_writer_of_a_checkpoint(
    recipe: Any, chatlearn: Any, result_of: Any, expected: Any
) -> None:
    killed = chatlearn("run", recipe.file, "checkpoint.background=true", PROBE="write beside:2")
    assert killed.code == KILLED, killed.output
    left = sorted(path.name for path in (recipe.run_dir / "checkpoints").iterdir())
    assert left == [".writing_step_00000002", "step_00000001"]
    resumed = chatlearn("run", recipe.file, "checkpoint.background=true")
    assert resumed.code == 0, resumed.output
    assert result_of(recipe.run_dir) == expected
    left = sorted(path.name for path in (recipe.run_dir / "checkpoints").iterdir())
    assert left == ["step_00000003", "step_00000004"]


def test_ids_that_tokens_were_sampled_from_survive(recipe: Any, chatlearn: Any, result_of: Any) -> None:
    """Truncated sampling: trainers renormalise over the kept ids of completions that a killed run had finished."""
    recipe.content["sampling"] |= {"top_k": 6, "top_p": 0.9}
    recipe.content["algorithm"]["options"] |= {"truncated_logprobs": True, "importance_correction": "truncate"}
    recipe.content["train"]["steps"] = 2
    recipe.write()
    undisturbed = recipe.file.parent / "undisturbed"
    assert chatlearn("run", recipe.file, f"output_dir={undisturbed}").code == 0
    assert chatlearn("run", recipe.file, PROBE="completion:18").code == KILLED
    resumed = chatlearn("run", recipe.file)
    assert resumed.code == 0, resumed.output
    assert result_of(recipe.run_dir) == result_of(undisturbed)


@pytest.mark.thorough
def test_killed_again_and_again(recipe: Any, chatlearn: Any, result_of: Any, expected: Any) -> None:
    for moment in ("update:2", "metrics:1", "save:1", "completion:5", "synced:2", "update:3"):
        assert chatlearn("run", recipe.file, PROBE=moment).code == KILLED
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    assert result_of(recipe.run_dir) == expected


@pytest.mark.slow
def test_killed_at_random_moments(recipe: Any, start: Callable[..., Any], result_of: Any, expected: Any) -> None:
    draw = random.Random(20)
    for _ in range(5):
        process = start("run", recipe.file)
        time.sleep(draw.uniform(0.2, 1.5))
        process.signal(signal.SIGKILL)
        if process.wait().code == 0:
            break  # the machine was quicker
    finished = start("run", recipe.file).wait()
    assert finished.code == 0 or "is complete: it made 4 of 4 steps" in finished.output, finished.output
    assert result_of(recipe.run_dir) == expected


def test_a_step_more_goes_on_where_the_run_ended(recipe: Any, chatlearn: Any, result_of: Any) -> None:
    assert chatlearn("run", recipe.file, "train.steps=2").code == 0
    first = result_of(recipe.run_dir)
    longer = chatlearn("run", recipe.file, "train.steps=3")
    assert longer.code == 0, longer.output
    assert "resuming after step 2" in longer.output
    assert "train.steps was 2, is 3: a schedule over the run's length continues with the new length" in longer.output
    both = result_of(recipe.run_dir)
    assert both.metrics[:2] == first.metrics
    assert both.model != first.model


@pytest.mark.parametrize("damage", ["cut short", "byte flipped", "file missing"])
def test_a_damaged_checkpoint_is_passed_over(
    damage: str, recipe: Any, chatlearn: Any, result_of: Any, expected: Any
) -> None:
    assert chatlearn("run", recipe.file, PROBE="saved:3").code == KILLED
    file: Path = recipe.run_dir / "checkpoints" / "step_00000003" / "roles" / "trainer" / "weights.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "file missing":
        file.unlink()
    elif damage == "cut short":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[-10] ^= 1
        file.write_bytes(content)
    resumed = chatlearn("run", recipe.file)
    assert resumed.code == 0, resumed.output
    assert "skipped a checkpoint" in resumed.output
    assert re.search(r"step_00000003 is damaged: .*roles/trainer/weights\.safetensors", resumed.output)
    assert "resuming after step 2" in resumed.output
    assert result_of(recipe.run_dir) == expected


def test_a_secret_of_the_environment_is_in_no_file_of_the_run_and_may_change(recipe: Any, chatlearn: Any) -> None:
    secrets = ("first-s3cret", "second-s3cret")
    recipe.content["roles"]["reward"] = {
        "kind": "reward",
        "backend": "format",
        "options": {"pattern": "${oc.env:ACME_TOKEN}", "num_workers": 1},
    }
    recipe.write()
    for steps, secret in enumerate(secrets, start=1):
        finished = chatlearn("run", recipe.file, f"train.steps={steps}", ACME_TOKEN=secret)
        assert finished.code == 0, finished.output
    assert "resuming after step 1" in finished.output
    assert "pattern: ${oc.env:ACME_TOKEN}" in (recipe.run_dir / "config.yaml").read_text()
    files = [file for file in recipe.run_dir.rglob("*") if file.is_file()]
    assert [file for file in files if any(secret.encode() in file.read_bytes() for secret in secrets)] == []


def test_changed_settings_are_refused(recipe: Any, chatlearn: Any) -> None:
    assert chatlearn("run", recipe.file, PROBE="saved:1").code == KILLED
    refused = chatlearn("run", recipe.file, "seed=1", "roles.trainer.options.learning_rate=0.1")
    assert refused.code == 2
    assert "seed: was 0, is 1" in refused.output
    assert "learning_rate: was 0.003, is 0.1" in refused.output
    assert "Traceback" not in refused.output


def test_going_back_deletes_nothing_unasked(recipe: Any, chatlearn: Any, result_of: Any) -> None:
    settings = ("train.steps=2", "checkpoint.keep_last=2")
    assert chatlearn("run", recipe.file, *settings).code == 0
    first = result_of(recipe.run_dir)
    refused = chatlearn("run", recipe.file, *settings, "--resume", "step_1")
    assert refused.code == 2, refused.output
    commands = [line.strip() for line in refused.output.splitlines() if line.startswith("  chatlearn run")]
    again = f"chatlearn run {recipe.file} {' '.join(settings)}"
    assert commands == [
        again,
        f"{again} --resume step_1 --rewind",
        f"{again} --resume {recipe.run_dir / 'checkpoints' / 'step_00000001'} output_dir=ANOTHER",
    ]
    assert result_of(recipe.run_dir) == first
    another = recipe.run_dir.with_name("another")
    apart = chatlearn(*commands[2].replace("ANOTHER", str(another)).split()[1:])
    assert apart.code == 0, apart.output
    assert result_of(another).model == first.model
    assert result_of(recipe.run_dir) == first
    gone_back = chatlearn(*commands[1].split()[1:])
    assert gone_back.code == 0, gone_back.output
    assert "removing checkpoints newer than step 1, of step 2" in gone_back.output
    assert result_of(recipe.run_dir) == first


@pytest.mark.thorough
def test_two_ranks_on_ray_write_beside_training(recipe: Any, chatlearn: Any, result_of: Any) -> None:
    options = {"learning_rate": 0.003, "num_threads": 1, "zero_stage": 2}
    recipe.content["roles"]["trainer"] = {"kind": "trainer", "backend": "fsdp", "ranks": 2, "options": options}
    recipe.content["roles"]["generator"]["backend"] = "transformers"
    recipe.content["runtime"] = {"backend": "ray", "options": {"object_store_mb": 100}}
    recipe.write()
    settings = ("checkpoint.background=true", "train.steps=3")
    finished = chatlearn("run", recipe.file, *settings)
    assert finished.code == 0, finished.output
    expected = result_of(recipe.run_dir)
    shutil.rmtree(recipe.run_dir / "checkpoints" / "step_00000003")
    resumed = chatlearn("run", recipe.file, *settings)
    assert resumed.code == 0, resumed.output
    assert "resuming after step 2" in resumed.output
    assert result_of(recipe.run_dir).model == expected.model
