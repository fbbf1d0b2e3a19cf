import shutil

import pytest
import torch

from chatlearn_core.exceptions import CheckpointError

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("updates_before", [0, 3])
def test_resuming_is_bit_identical(make_trainer, make_batch, policy_loss, weights_of, tmp_path, updates_before) -> None:
    options = {"schedule": "cosine", "warmup_steps": 1, "total_updates": 8, "weight_decay": 0.01}
    straight = make_trainer(**options)
    for seed in range(updates_before):
        straight.update(make_batch(seed), policy_loss)
    straight.save(tmp_path / "saved")
    resumed = make_trainer(**options)
    resumed.update(make_batch(99), policy_loss)
    resumed.load(tmp_path / "saved")
    for trainer in (straight, resumed):
        for seed in range(3, 6):
            trainer.update(make_batch(seed), policy_loss)
    assert resumed.num_updates == straight.num_updates
    ours, theirs = weights_of(straight), weights_of(resumed)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_random_state_is_restored(make_trainer, tmp_path) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "saved")
    expected = torch.rand(3)
    trainer.load(tmp_path / "saved")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.pt", "trainer.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damage_is_named(make_trainer, make_batch, policy_loss, tmp_path, name, damage) -> None:
    trainer = make_trainer()
    trainer.update(make_batch(), policy_loss)
    trainer.save(tmp_path / "saved")
    file = tmp_path / "saved" / name
    if damage == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=name):
        trainer.load(tmp_path / "saved")


def test_a_checkpoint_of_another_head_is_refused(make_trainer, tmp_path) -> None:
    make_trainer().save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="head 'lm'"):
        make_trainer(head="value").load(tmp_path / "saved")


def test_a_reference_reads_what_a_trainer_wrote(make_trainer, make_batch, policy_loss, weights_of, tmp_path) -> None:
    trainer, reference = make_trainer(), make_trainer(trainable=False)
    trainer.update(make_batch(), policy_loss)
    trainer.save(tmp_path / "saved")
    reference.load(tmp_path / "saved")
    ours, theirs = weights_of(trainer), weights_of(reference)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    shutil.rmtree(tmp_path / "saved")
