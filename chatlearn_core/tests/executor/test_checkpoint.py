"""Checkpoints are whole or not there: sealed, verified, passed over when damaged, thinned out without a gap."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from chatlearn_core.exceptions import BackendError, CheckpointError
from chatlearn_core.executor import checkpoint
from chatlearn_core.executor.checkpoint import SEAL, CheckpointStore, read_checkpoint
from chatlearn_core.metrics.durable_files import file_facts
from chatlearn_core.types import FileFacts

CONFIG = {"seed": 0, "train": {"steps": 10}}


def make_store(tmp_path: Path, *, keep_last: int = 10, keep_best: int = 0) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep_last=keep_last, keep_best=keep_best)


def save(store: CheckpointStore, step: int, metric: float | None = None) -> None:
    with store.write(step, {"config": CONFIG, "metric": metric, "sampler": {"drawn": step}}) as directory:
        (directory / "roles" / "trainer").mkdir(parents=True)
        (directory / "roles" / "trainer" / "weights").write_bytes(bytes(range(100)) + bytes([step]))
        (directory / "note.txt").write_text(f"step {step}")


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def test_what_was_written_is_found_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 3, 0.5)
    checkpoint, problems = store.newest()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.metric, problems) == (3, 0.5, [])
    assert checkpoint.state["sampler"] == {"drawn": 3}
    assert (checkpoint.path / "note.txt").read_text() == "step 3"
    assert names(store) == ["step_00000003"]


def test_there_is_none_at_first(tmp_path: Path) -> None:
    assert make_store(tmp_path).newest() == (None, [])


def test_before_the_block_ends_there_is_no_checkpoint(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 1)
    with store.write(2, {"config": CONFIG}) as directory:
        (directory / "weights").write_text("half")
        found, _ = store.newest()
        assert found is not None
        assert found.step == 1
    assert [checkpoint.step for checkpoint in store.complete()] == [1, 2]


def test_a_block_that_raises_leaves_nothing_behind(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 1)

    def fail() -> None:
        with store.write(2, {}) as directory:
            (directory / "weights").write_text("half")
            raise KeyError("role")

    with pytest.raises(KeyError):
        fail()
    assert names(store) == ["step_00000001"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), BackendError("role 'trainer': save failed: disk quota")]
)
def test_a_disk_that_takes_no_more_is_told_and_the_checkpoint_before_stays(tmp_path: Path, error: Exception) -> None:
    store = make_store(tmp_path)
    save(store, 1)

    def fail() -> None:
        with store.write(2, {}):
            raise error

    with pytest.raises(
        CheckpointError, match=r"cannot write the checkpoint of step 2 to .*step_00000002: .*free space"
    ):
        fail()
    checkpoint, problems = store.newest()
    assert checkpoint is not None
    assert (checkpoint.step, problems) == (1, [])
    assert names(store) == ["step_00000001"]


def damage_truncate(path: Path) -> str:
    file = path / "roles" / "trainer" / "weights"
    file.write_bytes(file.read_bytes()[:50])
    return "roles/trainer/weights has 50 bytes, 101 were written"


def damage_flip(path: Path) -> str:
    file = path / "roles" / "trainer" / "weights"
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    return "the contents of roles/trainer/weights changed since it was written"


def damage_missing(path: Path) -> str:
    (path / "note.txt").unlink()
    return "note.txt is missing"


def damage_seal(path: Path) -> str:
    seal = path / SEAL
    seal.write_text(seal.read_text()[:30])
    return f"is not a complete checkpoint: {SEAL}"


def damage_no_seal(path: Path) -> str:
    (path / SEAL).unlink()
    return f"is not a complete checkpoint: it has no {SEAL}, written last"


def damage_format(path: Path) -> str:
    seal = path / SEAL
    seal.write_text(json.dumps(json.loads(seal.read_text()) | {"format": 99}))
    return "has checkpoint format 99; this version reads 1"


def damage_state(path: Path) -> str:
    """JSON still, with another number."""
    seal = path / SEAL
    seal.write_text(json.dumps(json.loads(seal.read_text()) | {"step": 99}))
    return f"the contents of {SEAL} changed since it was written"


def damage_files(path: Path) -> str:
    (path / SEAL).write_text('{"format": 1, "step": 2, "state": {}, "files": {"note.txt": 3}}')
    return f"is not a complete checkpoint: {SEAL}"


def damage_config(path: Path) -> str:
    """Sealed by a program that stores no settings."""
    _reseal(path, state={"sampler": {"drawn": 3}})
    return f"is damaged: {SEAL} has no settings of its run (state.config)"


def damage_train(path: Path) -> str:
    """Settings without the length of the run."""
    _reseal(path, state={"config": {"seed": 0, "train": [10]}})
    return f"is damaged: {SEAL} has no settings of its run (state.config)"


def damage_step(path: Path) -> str:
    """Another step's checkpoint under this name."""
    shutil.rmtree(path)
    path.symlink_to("step_00000002")
    return f"is damaged: {SEAL} is of step 2, and the directory's name says 3"


def _reseal(path: Path, **changes: object) -> None:
    seal = json.loads((path / SEAL).read_text()) | changes
    del seal["sha256"]
    (path / SEAL).write_text(json.dumps(seal))


def damage_depth(path: Path) -> str:
    (path / SEAL).write_text("[" * 100_000)
    return f"is not a complete checkpoint: {SEAL}"


def damage_unreadable(path: Path) -> str:
    """A directory in its place: root may read every file."""
    (path / "note.txt").unlink()
    (path / "note.txt").mkdir()
    seal = json.loads((path / SEAL).read_text())
    seal["files"]["note.txt"]["bytes"] = (path / "note.txt").stat().st_size
    del seal["sha256"]
    (path / SEAL).write_text(json.dumps(seal))
    return "cannot be read: note.txt: Is a directory"


@pytest.mark.parametrize(
    "damage",
    [
        damage_truncate,
        damage_flip,
        damage_missing,
        damage_seal,
        damage_no_seal,
        damage_format,
        damage_state,
        damage_files,
        damage_config,
        damage_train,
        damage_step,
        damage_depth,
        damage_unreadable,
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, damage: object) -> None:
    assert callable(damage)
    store = make_store(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    problem = damage(store.directory / "step_00000003")
    checkpoint, problems = store.newest()
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert len(problems) == 1
    assert str(store.directory / "step_00000003") in problems[0]
    assert problem in problems[0]
    with pytest.raises(CheckpointError, match="step_00000003"):
        read_checkpoint(store.directory / "step_00000003")


def test_a_checkpoint_that_was_copied_under_a_name_of_its_own_is_whole(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 3)
    shutil.copytree(store.directory / "step_00000003", tmp_path / "best")
    assert read_checkpoint(tmp_path / "best").step == 3


def test_if_all_are_damaged_each_is_named(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for step in (1, 2):
        save(store, step)
        damage_flip(store.directory / f"step_{step:08d}")
    checkpoint, problems = store.newest()
    assert checkpoint is None
    assert len(problems) == 2


def test_the_last_are_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=2)
    for step in range(1, 6):
        save(store, step)
    assert [checkpoint.step for checkpoint in store.complete()] == [4, 5]
    assert names(store) == ["step_00000004", "step_00000005"]


def test_the_best_are_kept_beside_them_and_the_later_of_equals(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=1, keep_best=2)
    for step, metric in enumerate([0.3, 0.9, None, 0.5, 0.9, 0.1], start=1):
        save(store, step, metric)
    assert [checkpoint.step for checkpoint in store.complete()] == [2, 5, 6]


def test_what_a_kill_left_is_cleared_away_by_the_next_write(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 1)
    shutil.copytree(store.directory / "step_00000001", store.directory / ".writing_step_00000002")
    shutil.copytree(store.directory / "step_00000001", store.directory / ".removing_step_00000000")
    assert [checkpoint.step for checkpoint in store.complete()] == [1]
    save(store, 2)
    assert names(store) == ["step_00000001", "step_00000002"]


def test_a_kill_while_an_old_one_is_removed_leaves_no_half_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, keep_last=1)
    save(store, 1)
    seen: list[list[str]] = []
    real = shutil.rmtree

    def watched(path: Path, *args: object, **kwargs: object) -> None:
        if path.exists():
            seen.append(names(store))
        real(path, ignore_errors=True)

    monkeypatch.setattr(shutil, "rmtree", watched)
    save(store, 2)
    assert seen == [[".removing_step_00000001", "step_00000002"]]


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 1, 0.1)
    save(store, 1, 0.2)
    [checkpoint] = store.complete()
    assert checkpoint.metric == 0.2


def test_later_ones_are_forgotten(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    damage_no_seal(store.directory / "step_00000003")
    assert store.steps_after(1) == [2, 3], "the damaged one too"
    store.forget_after(1)
    assert names(store) == ["step_00000001"]


def test_other_directories_are_left_alone(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=1)
    (store.directory / "step_mine").mkdir(parents=True)
    for step in (1, 2):
        save(store, step)
    assert names(store) == ["step_00000002", "step_mine"]


def facts_of(text: str) -> FileFacts:
    return FileFacts(len(text), hashlib.sha256(text.encode()).hexdigest())


def test_files_of_which_their_writer_tells_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests that a trainer reports are recorded, others computed; reading compares both with the disk."""
    read: list[str] = []
    monkeypatch.setattr(
        checkpoint, "file_facts", lambda directory, names: (read.extend(names), file_facts(directory, names))[1]
    )
    store, facts = make_store(tmp_path), {}
    with store.write(2, {"config": CONFIG}, facts) as directory:
        (directory / "told").write_text("weights")
        (directory / "untold").write_text("state")
        facts["told"] = facts_of("weights")
    assert read == ["untold"]
    assert read_checkpoint(store.path_of(2)).step == 2
    (store.path_of(2) / "told").write_text("WEIGHTS")
    with pytest.raises(CheckpointError, match="the contents of told changed"):
        read_checkpoint(store.path_of(2))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"shard-1": facts_of("weights")}, "lacks shard-1, which its trainer says it has written"),
        ({"weights": facts_of("longer weights")}, "weights has 7 bytes, but its trainer reported 14"),
    ],
)
def test_a_file_that_is_not_as_its_writer_says_is_no_checkpoint(tmp_path: Path, told, message: str) -> None:
    store = make_store(tmp_path)

    def write() -> None:
        with store.write(2, {"config": CONFIG}, told) as directory:
            (directory / "weights").write_text("weights")

    with pytest.raises(CheckpointError, match=message):
        write()
    assert names(store) == []
