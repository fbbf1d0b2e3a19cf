import json
import os
import pickle
import shutil
import threading

import pytest
import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from chatlearn_core.exceptions import BackendError, CheckpointError
from chatlearn_core.metrics.durable_files import file_facts
from chatlearn_fsdp import checkpoint

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "chosen", [{}, {"cpu_offload": True}, {"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.9}], ids=str
)
@pytest.mark.parametrize("updates_before", [0, 3])
def test_resuming_is_bit_identical(
    make_trainer, make_batch, policy_loss, weights_of, tmp_path, updates_before, chosen
) -> None:
    options = {"schedule": "cosine", "warmup_steps": 1, "total_updates": 8, "weight_decay": 0.01} | chosen
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


def test_a_reference_reads_a_trainer_s_checkpoint(make_trainer, make_batch, policy_loss, weights_of, tmp_path) -> None:
    trainer, reference = make_trainer(), make_trainer(trainable=False)
    trainer.update(make_batch(), policy_loss)
    trainer.save(tmp_path / "saved")
    reference.load(tmp_path / "saved")
    ours, theirs = weights_of(trainer), weights_of(reference)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    shutil.rmtree(tmp_path / "saved")


class Hostile:
    """Makes a directory when it is unpickled."""

    def __init__(self, directory) -> None:
        self.directory = directory

    def __reduce__(self):
        return os.mkdir, (str(self.directory),)


@pytest.mark.parametrize("file", ["shards/.metadata", "shards/__0.metadata", "random_0.pt", "optimizer.pt"])
def test_no_file_of_a_checkpoint_executes_anything(make_trainer, tmp_path, file) -> None:
    trainer, saved = make_trainer(), tmp_path / "saved"
    trainer.save(saved)
    if file != "optimizer.pt":  # one process reads what several wrote, or claim to have written
        record = json.loads((saved / "trainer.json").read_text())
        (saved / "trainer.json").write_text(json.dumps(record | {"sharded": True}))
        save_sharded({"model": trainer._model.model.state_dict()}, checkpoint_id=saved / "shards", no_dist=True)
    hostile = Hostile(tmp_path / "executed")
    if file.endswith(".metadata"):
        (saved / "shards" / ".metadata").unlink()
        (saved / file).write_bytes(pickle.dumps(hostile))
    else:
        torch.save(hostile, saved / file)
    with pytest.raises(CheckpointError, match=str(saved)):
        trainer.load(saved)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [[1], {}, {"optimizer": {}, "random": {}}, {"optimizer": {}, "random": {"cpu": 3}}])
def test_an_optimizer_file_of_another_shape_is_damaged(make_trainer, tmp_path, content) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "saved")
    torch.save(content, tmp_path / "saved" / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
        trainer.load(tmp_path / "saved")


class TestInTheBackground:
    def test_training_goes_on_while_the_copy_is_written(
        self, make_trainer, make_batch, policy_loss, weights_of, tmp_path, monkeypatch
    ) -> None:
        may_write, writes = threading.Event(), checkpoint.write_single
        monkeypatch.setattr(checkpoint, "write_single", lambda *args: may_write.wait(60) and writes(*args))
        trainer = make_trainer()
        trainer.update(make_batch(0), policy_loss)
        saved = weights_of(trainer)
        trainer.begin_save(tmp_path / "saved")
        trainer.update(make_batch(1), policy_loss)
        assert not (tmp_path / "saved" / "trainer.json").exists()
        may_write.set()
        facts = trainer.finish_save()
        assert facts == file_facts(tmp_path / "saved", ["weights.safetensors", "optimizer.pt", "trainer.json"])
        resumed = make_trainer()
        resumed.load(tmp_path / "saved")
        assert all(torch.equal(tensor, saved[name]) for name, tensor in weights_of(resumed).items())
        resumed.update(make_batch(1), policy_loss)
        ours, theirs = weights_of(resumed), weights_of(trainer)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "optimizer state, too"

    def test_what_the_writer_raises_is_raised_and_another_may_begin(self, make_trainer, tmp_path) -> None:
        trainer = make_trainer()
        with pytest.raises(BackendError, match="no checkpoint to finish"):
            trainer.finish_save()
        (tmp_path / "blocked").mkdir()
        (tmp_path / "blocked" / "weights.safetensors").mkdir()
        trainer.begin_save(tmp_path / "blocked")
        with pytest.raises((OSError, SafetensorError)):
            trainer.finish_save()
        trainer.begin_save(tmp_path / "again")
        assert trainer.finish_save().keys() == {"weights.safetensors", "optimizer.pt", "trainer.json"}

    @pytest.mark.parametrize("call", ["save", "begin_save", "load"])
    def test_one_that_was_given_up_is_waited_for(self, make_trainer, tmp_path, monkeypatch, call) -> None:
        may_write, writes = threading.Event(), checkpoint.write_single
        trainer = make_trainer()
        trainer.save(tmp_path / "other")

        def write(directory, *args):
            assert directory.name == "other" or may_write.wait(60)
            return writes(directory, *args)

        monkeypatch.setattr(checkpoint, "write_single", write)
        trainer.begin_save(tmp_path / "saved")
        threading.Timer(0.2, may_write.set).start()
        getattr(trainer, call)(tmp_path / "other")
        assert (tmp_path / "saved" / "trainer.json").exists()
