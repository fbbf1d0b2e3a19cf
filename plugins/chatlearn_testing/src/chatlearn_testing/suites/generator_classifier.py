"""The contract of a generator that serves sequence classifiers: scores are the model's, and nothing is sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch

from chatlearn_core.exceptions import BackendError
from chatlearn_core.plugins.compatibility import classifies
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.types import Completion, GenerateRequest
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.generator_fixtures import (
    ABSOLUTE,
    MODEL_LENGTH,
    PROMPTS,
    GeneratorFixtures,
    Replica,
    ask,
)


@dataclass(slots=True, frozen=True)
class ClassifierCase:
    """A sequence classifier that a generator can serve."""

    build_model: str
    """Import string of a function ``(directory) -> directory`` that writes the classifier: float32, one label, at least
    26 tokens in its vocabulary."""
    load_reference: str
    """Import string of a function that loads it with code that is not under test:
    ``(directory) -> module``, ``module(token_ids [T]) -> scores [1]``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the generator under which it serves a classifier, in addition to those of the suite."""


@dataclass(slots=True, frozen=True)
class Classifier:
    """A replica that serves a classifier."""

    replica: Replica
    reference: torch.nn.Module

    def expected(self, prompt: Sequence[int]) -> float:
        """Compute the score of a prompt with a plain forward."""
        with torch.no_grad():
            return float(self.reference(torch.tensor(prompt)))


class ClassifierContract(GeneratorFixtures, ConformanceSuite):
    """The part of ``GeneratorConformance`` about sequence classifiers."""

    settable: ClassVar[frozenset[str]] = frozenset({"classifier"})
    classifier: ClassVar[ClassifierCase | None] = None
    """For a record that declares ``classifies``."""

    @pytest.fixture(scope="class")
    @classmethod
    def classifying(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Classifier]:
        """A replica that serves the suite's classifier."""
        record, case = cls.record(), cls.classifier
        if not record.classifies:
            not_applicable("the record does not declare classifies")
        assert case is not None, "the record declares classifies: set classifier, a ClassifierCase, to test it"
        directory = resolve_import_string(case.build_model)(tmp_path_factory.mktemp("classifier"))
        options = cls.make_options(dtype="float32", **case.options)
        assert classifies(record, options), f"with the options {dict(case.options)} it does not serve a classifier"
        generator = cls.build_generator(directory, options=options)
        try:
            generator.setup()
            replica = Replica(generator, cls.patience_s)
            yield Classifier(replica, resolve_import_string(case.load_reference)(directory))
        finally:
            generator.close()
        replica.close()

    def test_scores_are_those_of_the_classifier(self, classifying: Classifier) -> None:
        """The score of a prompt is that of a plain forward, whichever other prompts are scored with it, and again when
        it is asked a second time. The completion has no tokens and the finish reason ``stop``.

        Usual causes: the hidden state of another token, padding or a prefix cache that counts, an activation (sigmoid)
        on top of the score.
        """
        prompts = {f"prompt-{index}": prompt for index, prompt in enumerate(_prompts())}
        for _ in range(2):
            together = classifying.replica.ask(*(_classify(name, prompt) for name, prompt in prompts.items()))
            for name, completion in zip(prompts, together, strict=True):
                _assert_score(completion, name, classifying.expected(prompts[name]))
        [alone] = classifying.replica.ask(_classify("alone", prompts["prompt-1"]))
        _assert_score(alone, "alone", classifying.expected(prompts["prompt-1"]))

    def test_a_classifier_takes_requests_to_classify_alone(self, classifying: Classifier) -> None:
        """Requests to sample or to score tokens, and prompts that are longer than the model takes, raise a
        ``BackendError`` that names the request; the replica serves on.
        """
        wrong = (
            replace(_classify("sampled", PROMPTS[0]), classify=False),
            _classify("too-long", [3] * (MODEL_LENGTH + 1)),
        )
        for request in wrong:
            with pytest.raises(BackendError) as caught:
                classifying.replica.ask(request)
            assert request.id in str(caught.value), f"does not name the request: {caught.value}"
        [served] = classifying.replica.ask(_classify("served", PROMPTS[0]))
        _assert_score(served, "served", classifying.expected(PROMPTS[0]))

    def test_a_model_that_samples_refuses_to_classify(self, replica: Replica) -> None:
        """A request to classify raises a ``BackendError`` that names it: a language model has no score."""
        if classifies(self.record(), self.make_options()):
            not_applicable("with the suite's options the generator serves a classifier")
        with pytest.raises(BackendError) as caught:
            replica.ask(_classify("classified", PROMPTS[0]))
        assert "classified" in str(caught.value), f"does not name the request: {caught.value}"


def _prompts() -> tuple[Sequence[int], ...]:
    """Of several lengths, up to the longest that the model takes; some begin alike."""
    longest = [3 + (7 * index) % 23 for index in range(MODEL_LENGTH)]
    return (*PROMPTS, longest, longest[:40], [*longest[:40], 4, 9])


def _classify(name: str, prompt: Sequence[int]) -> GenerateRequest:
    return replace(ask(name, prompt, max_tokens=1), classify=True)


def _assert_score(completion: Completion, name: str, expected: float) -> None:
    assert completion.request_id == name, f"request {name!r} got completion {completion.request_id!r}"
    assert completion.score is not None, f"{name}: the completion has no score"
    assert abs(completion.score - expected) <= ABSOLUTE, (
        f"{name}: the score is {completion.score}, a plain forward gives {expected}"
    )
    assert len(completion.token_ids) == 0, f"{name}: {len(completion.token_ids)} tokens were sampled"
    assert completion.finish_reason == "stop", f"{name}: the finish reason is {completion.finish_reason!r}"
