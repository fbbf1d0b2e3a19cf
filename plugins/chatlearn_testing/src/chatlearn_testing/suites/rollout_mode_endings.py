"""The contract of a rollout mode's endings: checkpoints, losses, errors, cancellation, and what remains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from chatlearn_core.exceptions import ChatLearnError, Interrupted
from chatlearn_core.executor.rollout_producer import RolloutProducer
from chatlearn_core.types import Sample
from chatlearn_testing.loop_watch import blocks_of, least
from chatlearn_testing.suites.rollout_mode_faults import WORDS
from chatlearn_testing.suites.rollout_mode_fixtures import (
    SLOW,
    STEPS,
    ModeStand,
    RolloutModeFixtures,
    WatchedRun,
    check_equal,
    check_versions,
    described,
    ids_of,
)

BLOCK_S = 0.25
"""Longest time for which a run may keep the event loop from other work, seconds; what the core does there counts."""

WAITING_TURNS = 20
"""Turns of the event loop after which a producer waits for a generator."""


class RolloutModeEndings(RolloutModeFixtures):
    """Base of ``RolloutModeConformance``."""

    repeatable: ClassVar[bool]
    overrides: ClassVar[tuple[str, ...]]
    patience_s: ClassVar[float]

    # Checkpoints

    @pytest.mark.parametrize(
        ("hook", "number", "every"),
        [
            ("chatlearn_rollout_end", 1, 1),
            ("chatlearn_rollout_end", 4, 1),
            ("chatlearn_weights_synced", 4, 2),
            ("chatlearn_checkpoint_saved", 2, 2),
        ],
        ids=["before_any", "step", "sync", "checkpoint"],
    )
    def test_a_stopped_run_goes_on(self, stand: ModeStand, hook: str, number: int, every: int) -> None:
        """A run that is stopped, and started again, trains on what it would have: no draw is lost, none comes twice.

        What is in flight when weights are synced is in ``pending``, and so in the checkpoint; ``updates_done`` goes on
        with it after a start. Usual causes: ``pending`` lacks groups that are finished, or still has those that a step
        took, or the progress of the unfinished.
        """
        if hook == "chatlearn_weights_synced":
            stand.require_rollouts()  # no weights are synced without a generator
        settings = (*SLOW, f"checkpoint.every={every}")
        for staleness in stand.staleness():
            name = stand.name("stopped")
            stopped = stand.make(name, staleness, *settings, stop=(hook, number))
            with pytest.raises(Interrupted):
                stand.run(stopped.train())
            resumed = stand.make(name, staleness, *settings)
            stand.finish(resumed)
            assert len(resumed.samples) < STEPS or number == 1, "the run goes on from a checkpoint"
            self._check_continued(stand, resumed, stopped.samples | resumed.samples, staleness)

    def test_a_lost_trainer_is_survived(self, stand: ModeStand) -> None:
        """After the loss of a trainer's rank the run goes back to its checkpoint: ``close``, ``pending`` and
        ``updates_done`` are called, and the same producer goes on.
        """
        lost = ("roles.trainer.options.fails_at=7", "roles.trainer.options.is_lost=true", "runtime.backend=rebuilding")
        for staleness in stand.staleness():
            found = stand.make(stand.name("lost"), staleness, *SLOW, *lost)
            stand.finish(found)
            self._check_continued(stand, found, found.samples, staleness)

    def test_what_is_in_flight_is_replaced_as_a_whole(self, stand: ModeStand) -> None:
        """``pending`` is a tuple that is never modified, nor are its groups: a checkpoint may be written later."""
        for staleness in stand.staleness():
            for step, (pending, before) in enumerate(stand.undisturbed(staleness, *SLOW).pending, 1):
                assert described(pending) == before, f"what was in flight after step {step} has changed since"

    # Errors

    @pytest.mark.parametrize("role", ["generator", "reward"])
    def test_one_failure_excludes_its_sample_alone(self, stand: ModeStand, role: str) -> None:
        """A request or a sample that fails is excluded with the reason, as in ``sync``; the run goes on."""
        stand.require_rollouts()
        [one, *_] = stand.sync().trained[3]
        settings = (f"roles.{role}.backend=faulty", f"roles.{role}.options.fails_on={json.dumps([one])}")
        expected = {sample.id: sample.exclusion for sample in stand.sync(*settings).samples[4]}
        found = stand.undisturbed(None, *settings)
        reasons = {sample.id: sample.exclusion for samples in found.samples.values() for sample in samples}
        assert {name for name, reason in reasons.items() if reason} == {one}, "other samples are excluded, or none is"
        assert reasons[one] == expected[one], f"{one} is excluded with {reasons[one]!r} instead of {expected[one]!r}"

    @pytest.mark.parametrize("fault", ["trainer", "generators", "rewards", "replica"])
    def test_what_ends_sync_ends_the_run(self, stand: ModeStand, fault: str) -> None:
        """An error that ends a run with ``sync`` ends it with the mode, too, under its own name and within patience.

        Nothing of the run may remain: no task, no thread, no file elsewhere. Usual causes: the result of a task is
        never asked for, or others are waited for first.
        """
        if fault != "trainer":  # the others make rollouts
            stand.require_rollouts()
        ids = json.dumps(stand.sync().trained[3])
        words = "died" if fault == "replica" else WORDS  # of its last loss, the sync may tell before the request
        settings = {
            "trainer": ("roles.trainer.backend=faulty", "roles.trainer.options.fails_at=7"),
            "generators": ("roles.generator.backend=faulty", f"roles.generator.options.fails_on={ids}"),
            "rewards": ("roles.reward.backend=faulty", f"roles.reward.options.fails_on={ids}"),
            "replica": (
                "roles.generator.backend=faulty",
                f"roles.generator.options.fails_on={ids}",
                "roles.generator.options.dies=true",
            ),
        }[fault]
        expected = self._error(stand, WatchedRun(stand.runs.make(stand.name("sync"), {}, *stand.overrides, *settings)))
        for staleness in stand.staleness():
            found = self._error(stand, stand.make(stand.name("failing"), staleness, *settings))
            same = type(found) is type(expected) and words in str(found)
            assert same, f"the run ends with {found!r} instead of {expected!r}"

    @pytest.mark.parametrize("where", ["producing", "training"])
    def test_a_cancelled_run_ends(self, stand: ModeStand, where: str) -> None:
        """Cancellation ends a run at once, in the middle of a production, too; no task remains.

        ``close`` cancels what is in flight, and waits until it has ended. Usual causes: ``close`` waits for rollouts
        to be made, or a wait in ``produce`` hides the cancellation.
        """
        if where == "producing":
            stand.require_rollouts()
            token = f"roles.generator.options.seconds_per_token={self.patience_s:g}"
            watched = stand.make(stand.name("cancelled"), None, token)
        else:
            watched = stand.make(stand.name("cancelled"), None, *SLOW, stop=("chatlearn_rollout_end", 2))
        with pytest.raises(Interrupted):
            stand.run(_cancelled_as_it_waits(watched) if where == "producing" else watched.train())

    def test_closing_again_is_fine(self, stand: ModeStand) -> None:
        """``close`` may be called when nothing is in flight, any number of times."""

        async def twice(watched: WatchedRun) -> None:
            await watched.train()
            await watched.run.producer.close()
            await watched.run.producer.close()

        watched = stand.make(stand.name("closed"), None)
        stand.run(twice(watched))
        assert isinstance(watched.run.producer, RolloutProducer), "the factory returns a RolloutProducer"

    def test_the_event_loop_stays_free(self, stand: ModeStand) -> None:
        """The mode does not block: generators, rewards and environments work on the same event loop."""

        def longest_s() -> float:
            watched = stand.make(stand.name("watched"), None)
            return blocks_of(asyncio.wait_for(watched.train(), self.patience_s)).longest_s

        stand.undisturbed(None, *SLOW)  # imports what a run imports
        blocked_s = least(longest_s, BLOCK_S)
        assert blocked_s < BLOCK_S, f"the event loop stood still for {blocked_s:.2f} s"

    # Internal methods

    def _check_continued(
        self, stand: ModeStand, watched: WatchedRun, samples: Mapping[int, Sequence[Sample]], staleness: int | None
    ) -> None:
        """Check that a run which went on after a stop or a loss trained on what the undisturbed run did."""
        undisturbed = stand.undisturbed(staleness, *SLOW)
        for step, (one, other) in enumerate(zip(ids_of(samples), undisturbed.trained, strict=True), 1):
            assert one == other, (
                f"with rollout.max_staleness {staleness}, step {step} trains on {one} instead of {other}"
            )
        found, expected = stand.result(watched), stand.result(undisturbed)
        counts: dict[str, Any] = {
            name: found["totals"][name] for name in expected["totals"] if name.startswith("samples/")
        }
        assert counts == {name: expected["totals"][name] for name in counts}, f"totals of the run are {counts}"
        if watched.run.config.checkpoint.every == 1:
            check_versions(samples, stand.weights(watched), stand.allowed(staleness))
        if self.repeatable:
            of_sync = {name for line in stand.result(stand.sync())["metrics"] for name in line}
            own = {name for line in expected["metrics"] for name in line} - of_sync
            check_equal(found, expected, "the undisturbed run", own)

    def _error(self, stand: ModeStand, watched: WatchedRun) -> ChatLearnError:
        """What a run ends with."""
        with pytest.raises(ChatLearnError) as caught:
            stand.run(watched.train())
        return caught.value


async def _cancelled_as_it_waits(watched: WatchedRun) -> None:
    """Cancel a run whose producer waits for rollouts."""
    running = asyncio.ensure_future(watched.train())
    await watched.asked.wait()
    for _ in range(WAITING_TURNS):
        await asyncio.sleep(0)
    running.cancel()
    await running
