"""What the contracts of schedules, step policies and sample filters share: the same questions, the same answers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.json_state import damaged, spoil, stored
from chatlearn_testing.other_process import in_another_process
from chatlearn_testing.process_state import other_random_state
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, nothing_changes
from chatlearn_testing.suites.light_imports import LightImports

Ask = Callable[[Any, Any], Any]
"""``(object, question) -> answer``; the answer can be compared."""


class DecisionSuite(LightImports):
    """Contract tests of every object that decides something in a run.

    A suite for one kind defines ``ask`` and ``questions``: what the object is asked in consecutive steps.
    """

    settable: ClassVar[frozenset[str]] = ConformanceSuite.settable | {"bad_options"}
    bad_options: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Options that must be refused, each as a whole."""
    methods: ClassVar[tuple[str, ...]]
    """Of the protocol."""
    ask: ClassVar[Ask]
    """A function of a module, so that another process can call it."""

    def questions(self) -> Sequence[Any]:
        """What the object is asked, in order; the same content at each call."""
        raise NotImplementedError

    def test_has_the_methods_of_its_protocol(self) -> None:
        """The object has every method of its protocol in ``chatlearn_core.protocols.decisions``."""
        made = self._made()
        missing = [name for name in self.methods if not callable(getattr(made, name, None))]
        assert not missing, f"a method of chatlearn_core.protocols.decisions is missing: {', '.join(missing)}"

    def test_bad_options_are_refused(self) -> None:
        """Each of ``bad_options`` is an error of the options model or, at the latest, of the factory: options are
        checked before a run starts, not in its hundredth step.
        """
        if not self.bad_options:
            not_applicable("the suite sets no bad_options")
        for bad in self.bad_options:
            try:
                self.build()(self.options_model()(**bad))
            except Exception:
                continue
            raise AssertionError(f"the options {dict(bad)} are taken")

    def test_the_same_questions_get_the_same_answers(self) -> None:
        """Two objects of the same options decide the same, whatever the global random state is: a resumed run must
        repeat what the first one did.
        """
        answers = []
        for seed in (1, 2):
            with other_random_state(seed):
                answers.append(self._answers(self._made()))
        self._assert_same(answers[1], answers[0], "another object of the same options decides otherwise")

    def test_another_process_decides_the_same(self) -> None:
        """A new process, with other hashes of strings, decides the same: a resumed run is one."""
        arguments = (self.record().factory, self.make_options(), type(self).ask, self.questions())
        there = in_another_process(_answers_of, *arguments, limit_s=self.patience_s)
        message = "another process decides otherwise: never iterate over a set, or hash a text"
        self._assert_same(there, self._answers(self._made()), message)

    def test_objects_share_nothing(self) -> None:
        """Two objects, asked in turns, decide as each would alone."""
        alone, questions = self._answers(self._made()), self.questions()
        one, other = self._made(), self._made()
        found, ask = [], type(self).ask
        for question in questions:
            found.append(ask(one, question))
            ask(other, question)
        self._assert_same(found, alone, "an object decides otherwise if another one is asked in between")

    def test_a_question_is_read_only(self) -> None:
        """What the object is asked about stays as it was: other plugins and the run read it, too."""
        made, ask = self._made(), type(self).ask
        for number, question in enumerate(self.questions()):
            before = pickle.dumps(question)
            ask(made, question)
            assert pickle.dumps(question) == before, f"question {number} was changed to {question!r:.300}"

    def test_the_process_stays_as_it_was(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Deciding prints nothing to standard output, writes no file and changes nothing that other code shares."""
        questions = self.questions()
        with nothing_changes(capfd):
            self._answers(self._made(), questions)

    # Internal methods

    def _made(self) -> Any:
        return self.build()(self.make_options())

    def _answers(self, made: Any, questions: Sequence[Any] | None = None) -> list[Any]:
        ask = type(self).ask
        return [ask(made, question) for question in (self.questions() if questions is None else questions)]

    def _assert_same(self, found: Sequence[Any], expected: Sequence[Any], message: str, first: int = 0) -> None:
        for number, (one, other) in enumerate(zip(found, expected, strict=True), first):
            assert one == other, f"{message} (answer {number} is {one!r:.200} instead of {other!r:.200})"


class StatefulDecisionSuite(DecisionSuite):
    """Contract tests of objects whose state is in checkpoints."""

    def test_a_restored_one_continues(self) -> None:
        """At any step, ``state_dict`` written as JSON and loaded by a new object gives the answers that would have
        followed. The loading object may have decided already: a run also returns to its last checkpoint.
        """
        questions, ask = self.questions(), type(self).ask
        expected = self._answers(self._made())
        for stop in range(len(questions) + 1):
            before = self._made()
            self._answers(before, questions[:stop])
            state = stored(before.state_dict())
            for used in (False, True):
                after = self._made()
                if used:
                    self._answers(after, questions)
                after.load_state_dict(state)
                found = [ask(after, question) for question in questions[stop:]]
                how = "by an object that had decided already" if used else "by a new object"
                self._assert_same(
                    found, expected[stop:], f"loaded after step {stop}, {how}, it decides otherwise", stop
                )

    def test_the_state_is_a_copy(self) -> None:
        """``state_dict`` changes nothing, later steps do not change what it returned, and ``load_state_dict`` keeps no
        reference to what it was given.
        """
        questions, ask = self.questions(), type(self).ask
        expected, middle = self._answers(self._made()), len(questions) // 2
        made, states, found = self._made(), [], []
        for question in questions:
            states.append((state := made.state_dict(), stored(state)))
            found.append(ask(made, question))
        self._assert_same(found, expected, "state_dict changed what it decides")
        changed = [number for number, (state, content) in enumerate(states) if state != content]
        assert not changed, "later steps changed a state that state_dict had returned: return a copy"
        state = states[middle][1]
        made.load_state_dict(state)
        spoil(state)
        tail = self._answers(made, questions[middle:])
        self._assert_same(tail, expected[middle:], "load_state_dict keeps what it was given: copy it", middle)

    def test_a_damaged_state_is_refused(self) -> None:
        """A state that lacks an entry, or has one of another type, is a ``CheckpointError`` or loads; never a
        ``KeyError``.
        """
        made = self._made()
        self._answers(made)
        state = stored(made.state_dict())
        for number, one in enumerate(damaged(state)):
            try:
                self._made().load_state_dict(one)
            except CheckpointError:
                continue
            except Exception as error:
                raise AssertionError(
                    f"the damaged state {one!r:.300} raises {error!r} instead of a CheckpointError"
                ) from error
            assert number or not state, f"the empty state loads, but after a few steps the state is {state!r:.300}"


def _answers_of(factory: str, options: Any, ask: Ask, questions: Sequence[Any]) -> list[Any]:
    """In another process: the answers of a new object."""
    made = resolve_import_string(factory)(options)
    return [ask(made, question) for question in questions]
