"""Real SIGKILLs and SIGSTOPs: whichever process dies or stops, in any phase of a run, nothing is lost or repeated, and
the run continues.

Six kinds of process (a generator replica, a reward worker, a trainer rank, an environment worker, a whole node, the
driver) die in every phase that the executor enumerates, and all but the driver are stopped; a run ends with the same
bits as one in which nothing happened. In the rollout modes that sample ahead they also die while a step's updates and
the next rollouts are made, and around a weight sync. Two cells are among the ordinary tests; the whole grid is marked
``grid`` (``make test-grid``).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.executor.phases import Phase
from chatlearn_testing.fakes.bigram import build_bigram_model

from .conftest import SMALL_NODE, write_distribution
from .fault_run import (
    FAULT_STEP,
    FROZEN,
    HEARTBEAT_S,
    KILLED,
    MOMENTS,
    STEPS,
    TARGETS,
    TRAPS,
    Watch,
    make_run,
    needs_environment,
    phase_of,
    write_config,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
MODULE = "chatlearn_ray_fault_backends"
PROGRAM = Path(__file__).parent / "fault_run.py"
ORDINARY = {
    "driver": Phase.SYNCING,
}
"""The phase in which a target is tested every time; other targets are in the grid only."""
ORDINARY_AHEAD = ("one_step_off", "generator", "ahead")
"""Likewise of the modes that sample ahead: no replica is rebuilt from weights between two updates."""
DRIVER_GONE_S = 60.0


def cells() -> Iterator[Any]:
    """Every target in every phase; those that are not in ``ORDINARY`` belong to the grid."""
    for target in TARGETS:
        for phase in Phase:
            marks = () if ORDINARY.get(target) is phase else (pytest.mark.grid,)
            yield pytest.param(target, str(phase), marks=marks, id=f"{target}-{phase}")


def cells_ahead() -> Iterator[Any]:
    """The modes that sample ahead, in the moments that they have."""
    for mode in ("one_step_off", "async"):
        for target in (target for target in KILLED if target != "node"):
            for moment in MOMENTS:
                if (moment == "draining") != (mode == "one_step_off") and moment != "ahead":
                    continue  # one_step_off waits for its completions, async interrupts them
                marks = () if (mode, target, moment) == ORDINARY_AHEAD else (pytest.mark.grid,)
                yield pytest.param(mode, target, moment, marks=marks, id=f"{mode}-{target}-{moment}")


class Scene:
    """A place for runs: model, data, configuration, and the result of a run without failures."""

    def __init__(self, folder: Path, site: Path) -> None:
        from chatlearn_hf.tiny import build_tiny_model, build_tiny_tokenizer

        self.folder, self.site = folder, site
        tokenizer = build_tiny_tokenizer(128, [f"How much is {i} plus {i + 3}? " for i in range(4 * STEPS)])
        self.model = build_tiny_model(folder / "model", "qwen3", hidden=16, layers=1, tokenizer=tokenizer)
        (self.model / "config.json").rename(folder / "config.json")
        build_bigram_model(self.model, vocab_size=len(tokenizer))  # the light backends' weights, and real tokens
        (folder / "config.json").rename(self.model / "config.json")
        self.undisturbed: dict[tuple[bool, str], Path] = {}
        """With or without an environment, and mode: the folder of a run without failures."""

    def cell(self, name: str, *, environment: bool = False, mode: str = "sync") -> Cell:
        directory = self.folder / name
        (directory / "faults").mkdir(parents=True)
        config = write_config(directory, self.model, directory / "faults", environment=environment, mode=mode)
        return Cell(self, directory, config, environment=environment)

    async def expected(self, *, environment: bool = False, mode: str = "sync") -> dict[str, Any]:
        """The result of a run without failures; computed once."""
        name = f"undisturbed-{mode}" + ("-rollouts" if environment else "")
        if (environment, mode) not in self.undisturbed:
            assert not (self.folder / name).exists(), "the undisturbed run failed: see the first error"
            cell = self.cell(name, environment=environment, mode=mode)
            watch = await cell.train("none", "")
            self.undisturbed[environment, mode] = cell.run_dir
            assert set(watch.phases) == {str(p) for p in Phase} - {"restoring", "recovering"}
            result = cell.result()
            assert max(abs(line["policy/pg_loss"]) for step, line in result["metrics"].items() if step) > 0
            assert all(line["sync/bytes"] > 0 for step, line in read_lines(cell.run_dir).items() if step)
            assert len({line["policy/grad_norm"] for step, line in result["metrics"].items() if step}) == STEPS
        directory = self.undisturbed[environment, mode].parent
        return Cell(self, directory, directory / "run.yaml").result()


class Cell:
    """One run and its folder."""

    def __init__(self, scene: Scene, directory: Path, config: Path, *, environment: bool = False) -> None:
        import chatlearn_ray_fault_backends as backends

        self.scene, self.directory, self.config, self.environment = scene, directory, config, environment
        self.faults = backends.Folder(directory / "faults")
        self.is_alive = backends.is_alive

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    async def train(self, target: str, phase: str, *overrides: str) -> Watch:
        watch = Watch(self.faults, target, phase)
        resume: Any = self.checkpoint() if phase == "restoring" else "auto"
        heartbeat = [f"runtime.options.heartbeat_timeout_s={HEARTBEAT_S}"] if target.startswith(FROZEN) else []
        await make_run(self.config, [*overrides, *heartbeat], watch, resume)
        return watch

    def checkpoint(self) -> Path:
        """Of the step before the fault, from the undisturbed run."""
        return self.scene.undisturbed[self.environment, "sync"] / "checkpoints" / f"step_{FAULT_STEP - 1:08d}"

    def program(self, target: str, phase: str, *overrides: str) -> subprocess.Popen[str]:
        """The run in a process of its own."""
        resume = [f"--resume={self.checkpoint()}"] if phase == "restoring" else []
        arguments = [self.scene.site, self.faults.path, self.config, target, phase, *resume, *overrides]
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def alive(self) -> list[dict[str, Any]]:
        """Processes of this run that have not ended."""
        return [process for process in self.faults.processes() if self.is_alive(process["pid"])]

    def result(self) -> dict[str, Any]:
        """What must not depend on who died."""
        lines = read_lines(self.run_dir)
        summary = json.loads((self.run_dir / "summary.json").read_text())
        return {
            "model": (self.run_dir / "model" / "model.safetensors").read_bytes(),
            "metrics": {step: untimed(line) for step, line in lines.items()},
            "rollouts": {f.name: f.read_text() for f in sorted((self.run_dir / "rollouts").iterdir())},
            "totals": summary["totals"],
            "status": (summary["status"], summary["steps"]),
        }


def read_lines(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The lines of ``metrics.jsonl`` by step; no step is there twice."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line for line in lines}


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    moving = ("timing_s/", "perf/", "sync/")
    return {name: value for name, value in line.items() if not name.startswith(moving)}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("faults")
    site = tmp_path_factory.mktemp("site")
    write_distribution(site, "1.0", MODULE, "fault_backends.py")
    sys.path.append(str(site))
    yield Scene(folder, site)
    sys.path.remove(str(site))
    sys.modules.pop(MODULE, None)


def test_every_phase_has_a_trap_and_every_target_a_test() -> None:
    assert list(TRAPS) == [str(phase) for phase in Phase]
    assert set(ORDINARY) <= set(TARGETS)
    assert len(list(cells())) == len(TARGETS) * len(Phase)


@pytest.mark.parametrize(("target", "phase"), list(cells()))
async def test_nothing_is_lost_when(
    target: str, phase: str, scene: Scene, ray_session: None, cluster: Any, leaves_nothing: object
) -> None:
    expected = await scene.expected(environment=needs_environment(target))
    cell = scene.cell(f"{target}-{phase}", environment=needs_environment(target))
    if target == "driver":
        await killed_driver(cell, phase, cluster)
    elif target.endswith("node"):
        await killed_node(cell, target, phase, cluster)
    else:
        watch = await cell.train(target, phase)
        assert phase in watch.phases
    check_kills(cell, target, phase)
    check_result(cell.result(), expected, phase)
    await gone(cell)


@pytest.mark.parametrize(("mode", "target", "moment"), list(cells_ahead()))
async def test_nothing_is_lost_of_rollouts_made_ahead_when(
    mode: str, target: str, moment: str, scene: Scene, ray_session: None, cluster: Any, leaves_nothing: object
) -> None:
    """In ``one_step_off`` the bits are the same; in ``async`` timing decides which weights sample a token."""
    expected = await scene.expected(environment=needs_environment(target), mode=mode)
    cell = scene.cell(f"{mode}-{target}-{moment}", environment=needs_environment(target), mode=mode)
    if target == "driver":
        await killed_driver(cell, moment, cluster)
    else:
        watch = await cell.train(target, moment)
        assert phase_of(moment) in watch.phases
    check_kills(cell, target, moment)
    check_weights(cell, goes_back=target in ("trainer", "driver"))
    found = cell.result()
    if mode == "one_step_off":
        check_result(found, expected, moment)
    else:
        assert sample_ids(found) == sample_ids(expected)
        assert found["status"] == ("completed", STEPS)
        for name in ("samples/admitted", "samples/total", "samples/trained", "samples/excluded"):
            assert found["totals"][name] == expected["totals"][name]
    await gone(cell)


def check_weights(cell: Cell, *, goes_back: bool) -> None:
    """Replicas sampled from one set of weights under each version; where the run went back to the checkpoint before the
    fault, the later versions were made again.
    """
    [killed] = [trap["time"] for trap in cell.faults.sprung()]
    digests: dict[int, set[str]] = {}
    for one in cell.faults.weights():
        if not goes_back or one["version"] < FAULT_STEP or one["time"] > killed:
            digests.setdefault(one["version"], set()).add(one["digest"])
    assert digests.keys() == set(range(STEPS + 1)), "every version was sampled from: the last one by the evaluation"
    assert {version: len(found) for version, found in digests.items()} == dict.fromkeys(digests, 1)


def sample_ids(result: dict[str, Any]) -> dict[str, list[str]]:
    """Which samples each step trained on."""
    return {
        name: [json.loads(line)["id"] for line in text.splitlines()]
        for name, text in result["rollouts"].items()
        if name.startswith("step")
    }


def check_kills(cell: Cell, target: str, phase: str) -> None:
    """Exactly the intended process was killed, inside the phase."""
    killed = [trap["victim"] for trap in cell.faults.sprung()]
    assert killed == (["trainer", target] if phase == "recovering" else [target])


def check_result(result: dict[str, Any], expected: dict[str, Any], phase: str) -> None:
    """The same bits; a run that began from a checkpoint of another has the later steps only."""
    first = FAULT_STEP if phase == "restoring" else 0
    later = {step: line for step, line in expected["metrics"].items() if step >= first}
    assert differences(result["metrics"], later) == []
    assert result["totals"] == expected["totals"], "no sample is lost or counted twice"
    kept = {name: text for name, text in expected["rollouts"].items() if int(name[:-6].rpartition("_")[2]) >= first}
    assert result["rollouts"] == kept
    assert result["model"] == expected["model"]
    assert result["status"] == ("completed", STEPS)


def differences(one: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> list[str]:
    """Every number that differs."""
    return [
        f"step {step}, {name}: {one.get(step, {}).get(name)} for {other.get(step, {}).get(name)}"
        for step in sorted(one.keys() | other.keys())
        for name in sorted(one.get(step, {}).keys() | other.get(step, {}).keys())
        if one.get(step, {}).get(name) != other.get(step, {}).get(name)
    ]


async def killed_driver(cell: Cell, phase: str, cluster: Any, *overrides: str) -> None:
    """The driver dies: every process of the run ends, and the same command goes on."""
    address = f"runtime.options.address={cluster.address}"
    driver = cell.program("driver", phase, address, *overrides)
    output, _ = await asyncio.to_thread(driver.communicate)
    assert driver.returncode == -9, output
    await gone(cell)
    again = cell.program("none", phase if phase == "restoring" else "", address, *overrides)
    output, _ = await asyncio.to_thread(again.communicate)
    if phase == "closing":
        assert "is complete: it made 3 of 3 steps" in output, output
    else:
        assert again.returncode == 0, output


async def killed_node(cell: Cell, target: str, phase: str, cluster: Any) -> None:
    """A node with a rank, a replica and a reward worker dies or freezes; a third one has room for them."""
    pool = {"slots": 2, "cpus": 3, "resources": {"slot": 1}, "strategy": "node_each"}
    placements = {role: {"pool": "apart"} for role in ("trainer", "generator", "reward")}
    nodes = [cluster.add_node(num_cpus=3, resources={"slot": 1}, **SMALL_NODE) for _ in range(3)]
    cluster.wait_for_nodes()
    try:
        await cell.train(
            target,
            phase,
            f"runtime.options.pools.apart={json.dumps(pool)}",
            f"runtime.options.roles={json.dumps(placements)}",
        )
    finally:
        for node in nodes:
            await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        cell.faults.thaw()


class SamplesKiller(Watch):
    """Kills the node that sampled and judged when all is there and the trainer, on another one, has seen none of it."""

    def enter(self, step: int, phase: str) -> None:
        super().enter(step, phase)
        if (step, phase) == (FAULT_STEP, Phase.COMPUTING) and not self.is_set:
            self.is_set = True
            self.folder.kill_node_of("generator")


async def test_samples_that_are_lost_with_their_node_before_training_are_made_again(
    scene: Scene, ray_session: None, cluster: Any, leaves_nothing: object
) -> None:
    """Surviving workers lose nothing, except the tokens."""
    expected = await scene.expected()
    cell = scene.cell("lost-samples")
    watch = SamplesKiller(cell.faults, "none", "")
    pools = {name: {"slots": 1, "cpus": 4, "resources": {name: 1}} for name in ("sampling", "training")}
    placements = {role: {"pool": "sampling", "per_slot": 2} for role in ("generator", "reward")}
    placements["trainer"] = {"pool": "training", "per_slot": 2}
    nodes = [
        cluster.add_node(num_cpus=4, resources={name: 1}, **SMALL_NODE) for name in ("training", "sampling", "sampling")
    ]
    cluster.wait_for_nodes()
    try:
        await make_run(
            cell.config,
            [f"runtime.options.pools={json.dumps(pools)}", f"runtime.options.roles={json.dumps(placements)}"],
            watch,
        )
    finally:
        for node in nodes:
            await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
    assert watch.is_set
    [lost] = [text for text in watch.said if "The trainer was rebuilt" in text]
    assert "sampled tokens were lost with the node that held them" in lost
    check_result(cell.result(), expected, "computing")
    await gone(cell)


async def gone(cell: Cell) -> None:
    """Every process of the run ends."""
    deadline = time.monotonic() + DRIVER_GONE_S
    while (left := cell.alive()) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    assert not left
