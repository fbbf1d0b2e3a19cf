"""A reference that follows the policy: by the closed form of a moving average, and bit-identical after a kill."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.engine

DECAY, EVERY = 0.5, 2
FOLLOWS = (
    f"roles.reference.refresh.role=trainer roles.reference.refresh.every={EVERY} roles.reference.refresh.decay={DECAY} "
    "algorithm.options.kl_coef=0.5 checkpoint.every=1 checkpoint.keep_last=9"
).split()


def weights(run_dir: Path, step: int, role: str) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / f"step_{step:08d}" / "roles" / role / "weights.safetensors")


def test_the_reference_is_a_moving_average_of_the_policy_and_resumes_bit_identically(
    recipe: Any, chatlearn: Any, result_of: Any
) -> None:
    finished = chatlearn("run", recipe.file, *FOLLOWS)
    assert finished.code == 0, finished.output
    expected = result_of(recipe.run_dir)
    assert [line.get("training/refreshed_roles", 0.0) for line in expected.metrics] == [0, 1, 0, 1]
    for step in range(2, 5):
        before, now = weights(recipe.run_dir, step - 1, "reference"), weights(recipe.run_dir, step, "reference")
        policy = weights(recipe.run_dir, step, "trainer")
        for name, tensor in now.items():
            own = before[name]
            average = own if step % EVERY else (DECAY * own.double() + (1 - DECAY) * policy[name].double()).float()
            torch.testing.assert_close(tensor, average, rtol=1e-6, atol=1e-8, msg=f"step {step}, {name}")
        assert any(not torch.equal(now[name], before[name]) for name in now) == (step % EVERY == 0)

    again = f"output_dir={recipe.file.parent / 'again'}"
    killed = chatlearn("run", recipe.file, *FOLLOWS, again, PROBE="update:10")  # step 3: after a refresh
    assert killed.code == -signal.SIGKILL, killed.output
    resumed = chatlearn("run", recipe.file, *FOLLOWS, again)
    assert resumed.code == 0, resumed.output
    assert result_of(recipe.file.parent / "again") == expected
    for name, tensor in weights(recipe.file.parent / "again", 4, "reference").items():
        assert torch.equal(tensor, weights(recipe.run_dir, 4, "reference")[name]), name
    changed = chatlearn("run", recipe.file, *FOLLOWS, again, "roles.reference.refresh.decay=0.9", "train.steps=5")
    assert "roles.reference.refresh.decay: was 0.5, is 0.9" in changed.output


@pytest.mark.parametrize(
    ("settings", "how"),
    [
        ([], "by direct: 'direct' is the fastest weight sync for trainer 'watched' and trainer 'fsdp'"),
        (["weight_sync.backend=checkpoint"], "by checkpoint: weight_sync.backend names it"),
        (["weight_sync.export=boxes"], "by shared_memory: "),
    ],
)
def test_the_dry_run_says_how_weights_get_there(recipe: Any, chatlearn: Any, settings: list[str], how: str) -> None:
    shown = chatlearn("run", recipe.file, *FOLLOWS, *settings, "--dry-run")
    assert shown.code == 0, shown.output
    assert f"trainer -> reference every 2 step(s), decay 0.5, {how}" in shown.output


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["role=reward"], "a role takes weights from another trainer role"),
        (["role=reference"], "a role takes weights from another trainer role"),
        (["role=trainer", "decay=1.0"], "must be less than 1"),
    ],
)
def test_a_refresh_that_cannot_be_is_refused(recipe: Any, chatlearn: Any, settings: list[str], message: str) -> None:
    given = [f"roles.reference.refresh.{setting}" for setting in ("every=1", *settings)]
    refused = chatlearn("config", "validate", recipe.file, *given)
    assert refused.code == 2, refused.output
    assert message in refused.output
