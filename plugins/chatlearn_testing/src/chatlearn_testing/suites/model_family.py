"""The contract of a model family: true facts, a tokenizer that fits, and errors that name the model directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.exceptions import ModelError
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.protocols import ModelSource
from chatlearn_core.protocols.model_family import ModelFacts, ModelFamily
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.other_process import in_another_process
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, nothing_changes
from chatlearn_testing.suites.light_imports import LightImports
from chatlearn_testing.suites.model_family_layouts import LayoutContract
from chatlearn_testing.suites.model_family_models import (
    CONFIG_FILE,
    BuiltModel,
    ModelFamilySuite,
    read_config,
    write_config,
)
from chatlearn_testing.suites.model_family_rendering import RenderingContract

Read = Callable[[ModelFamily, ModelSource], Any]
READERS: Mapping[str, Read] = {
    "model_type": lambda family, source: family.model_type(source),
    "facts": lambda family, source: family.facts(source),
    "load_tokenizer": lambda family, source: family.load_tokenizer(source),
}
BROKEN: Mapping[str, bytes | None] = {
    "no config.json": None,
    "no JSON": b'{"model_type": ',
    "a list": b"[]",
    "nothing in it": b"{}",
    "no text": b"\xff\xfe\x00",
}
"""Content of ``config.json`` that describes no model; None: the file is missing."""


class ModelFamilyConformance(RenderingContract, LayoutContract, LightImports, ModelFamilySuite, ConformanceSuite):
    """Contract tests that every model family must pass.

    A subclass sets ``backend`` and ``cases``: a small model of each type that the record declares; and
    ``round_trips`` if the record has ``layouts``.
    """

    def test_is_a_model_family(self) -> None:
        """The object has every method of ``ModelFamily``."""
        family = self._family()
        missing = [name for name in (*READERS, "renderer") if not callable(getattr(family, name, None))]
        assert not missing, f"a method of chatlearn_core.protocols.ModelFamily is missing: {', '.join(missing)}"

    def test_no_option_is_required(self) -> None:
        """The options have defaults: a run builds a family from the type of a model, and no configuration sets them."""
        self.options_model()()

    def test_every_declared_type_has_a_case(self) -> None:
        """There is a case for each of the record's ``model_types``, and for no other type if there are any."""
        declared, tested = self.record().model_types, {case.model_type for case in self.cases}
        assert tested, "set cases: a small model of each type"
        if declared:
            assert declared <= tested, f"no case for {', '.join(sorted(declared - tested))}, which the record declares"
            assert tested <= declared, f"model_types of the record lacks {', '.join(sorted(tested - declared))}"

    def test_the_type_is_that_of_the_configuration(self, models: Sequence[BuiltModel]) -> None:
        """``model_type`` and ``facts`` name the type that ``config.json`` names."""
        for model in models:
            named = read_config(model.directory)["model_type"]
            assert named == model.case.model_type, f"the case of {model.case.model_type!r} builds a model of {named!r}"
            assert self._family().model_type(model.source) == named
            assert self._family().facts(model.source).model_type == named

    def test_a_type_that_nobody_knows_is_named(self, models: Sequence[BuiltModel], tmp_path: Path) -> None:
        """The family that reads every type (no ``model_types``) names types that it cannot read, too: it is asked which
        family to take.
        """
        if self.record().model_types:
            not_applicable("the record declares model_types; only a family of all types is asked")
        directory = models[0].copy(tmp_path / "model")
        write_config(directory, read_config(directory) | {"model_type": "conformance_new_type"})
        found = self._family().model_type(ModelSource(str(directory), str(directory)))
        assert found == "conformance_new_type", f"model_type returns {found!r} for 'conformance_new_type'"

    def test_facts_are_those_of_the_cases(self, models: Sequence[BuiltModel]) -> None:
        """Vocabulary and longest sequence are whole numbers, and those of the case."""
        for model in models:
            facts = self._family().facts(model.source)
            assert isinstance(facts, ModelFacts), f"facts returned {facts!r:.100}, not ModelFacts"
            for name in ("vocab_size", "max_length"):
                found, expected = getattr(facts, name), getattr(model.case, name)
                assert type(found) is int, f"{model.case.model_type}: {name} is {found!r}, not a whole number"
                assert found == expected, f"{model.case.model_type}: {name} is {found}, not {expected}"

    def test_the_configuration_can_be_stored(self, models: Sequence[BuiltModel]) -> None:
        """``ModelFacts.config`` is a mapping that JSON can hold, and ``snapshot`` is None for a directory: only a hub
        id has one.
        """
        for model in models:
            facts = self._family().facts(model.source)
            assert isinstance(facts.config, Mapping), f"config is a {type(facts.config).__name__}"
            json.dumps(dict(facts.config))
            assert facts.snapshot is None, f"snapshot is {facts.snapshot!r}, but {model.directory} is a directory"

    def test_facts_do_not_depend_on_what_was_read_before(self, models: Sequence[BuiltModel]) -> None:
        """One family, asked about all models in turn and again, says what a new one says of each; a caller that changes
        what it got changes nothing.
        """
        used = self._family()
        for model in (*models, *models[::-1]):
            fresh, found = self._family().facts(model.source), used.facts(model.source)
            assert found == fresh, f"facts of {model.case.model_type!r} changed to {found}"
            assert dict(found.config) == dict(fresh.config), f"the configuration of {model.case.model_type!r} changed"
            if isinstance(found.config, dict):
                found.config.clear()

    def test_a_changed_directory_is_read_again(self, models: Sequence[BuiltModel], tmp_path: Path) -> None:
        """Facts are those of the files as they are now: an export may replace a model directory between two runs of one
        process.
        """
        first, other = models[0], models[-1]
        directory = first.copy(tmp_path / "model")
        family, source = self._family(), ModelSource(str(directory), str(directory))
        assert family.facts(source).vocab_size == first.case.vocab_size
        (directory / CONFIG_FILE).write_bytes(b"")
        with pytest.raises(ModelError):
            family.facts(source)
        write_config(directory, read_config(other.directory))
        if first is not other:
            assert family.model_type(source) == other.case.model_type

    def test_another_process_reads_the_same(self, models: Sequence[BuiltModel]) -> None:
        """A new process reads the same facts and tokens."""
        asked = [(model.source, model.case.text) for model in models]
        here = _read(self.record().factory, self.make_options(), asked)
        there = in_another_process(_read, self.record().factory, self.make_options(), asked, limit_s=self.patience_s)
        for model, one, other in zip(models, here, there, strict=True):
            assert one == other, f"another process reads {other} instead of {one} for {model.case.model_type!r}"

    @pytest.mark.parametrize("reader", READERS)
    @pytest.mark.parametrize("content", BROKEN)
    def test_a_broken_configuration_is_refused(
        self, reader: str, content: str, models: Sequence[BuiltModel], tmp_path: Path
    ) -> None:
        """A model directory without a readable configuration is a ``ModelError`` that names it, from every method."""
        directory = models[0].copy(tmp_path / "broken-model")
        (directory / CONFIG_FILE).unlink()
        if (broken := BROKEN[content]) is not None:
            (directory / CONFIG_FILE).write_bytes(broken)
        with pytest.raises(ModelError) as caught:
            READERS[reader](self._family(), ModelSource(str(directory), str(directory)))
        assert "broken-model" in str(caught.value), f"{str(caught.value)!r} does not name the directory"

    @pytest.mark.parametrize("reader", READERS)
    def test_a_missing_directory_is_refused(self, reader: str, tmp_path: Path) -> None:
        """A path at which nothing is, is a ``ModelError`` that names it."""
        missing = str(tmp_path / "missing-model")
        with pytest.raises(ModelError) as caught:
            READERS[reader](self._family(), ModelSource(missing, missing))
        assert "missing-model" in str(caught.value), f"{str(caught.value)!r} does not name the path"

    def test_a_missing_tokenizer_is_refused(self, models: Sequence[BuiltModel], tmp_path: Path) -> None:
        """A directory without a tokenizer is a ``ModelError`` that names it."""
        if not self.has_tokenizer_files:
            not_applicable("has_tokenizer_files is False: the tokenizer follows from the configuration")
        empty = tmp_path / "no-tokenizer"
        empty.mkdir()
        for model in models:
            with pytest.raises(ModelError) as caught:
                self._family().load_tokenizer(replace(model.source, tokenizer_path=str(empty)))
            assert "no-tokenizer" in str(caught.value), f"{str(caught.value)!r} does not name the directory"

    def test_a_tokenizer_of_another_model_is_refused(self, models: Sequence[BuiltModel], tmp_path: Path) -> None:
        """A tokenizer with more tokens than the model has is a ``ModelError`` that names the model, not an index error
        in the first step.
        """
        if not self.has_tokenizer_files:
            not_applicable("has_tokenizer_files is False: the tokenizer follows from the configuration")
        for number, model in enumerate(models):
            directory = model.copy(tmp_path / f"small-{number}")
            content = read_config(directory)
            places = [part for part in (content, *content.values()) if isinstance(part, dict) and "vocab_size" in part]
            if not places:
                not_applicable("config.json has no vocab_size that a test could change")
            for part in places:
                part["vocab_size"] = 4
            write_config(directory, content)
            with pytest.raises(ModelError) as caught:
                self._family().load_tokenizer(ModelSource(str(directory), str(model.directory)))
            assert directory.name in str(caught.value), f"{str(caught.value)!r} does not name the model"

    def test_the_process_stays_as_it_was(self, models: Sequence[BuiltModel], capfd: pytest.CaptureFixture[str]) -> None:
        """Reading a model prints nothing to standard output, writes no file and changes nothing that others share."""
        with nothing_changes(capfd):
            for model in models:
                for read in READERS.values():
                    read(self._family(), model.source)


def _read(factory: str, options: Any, asked: Sequence[tuple[ModelSource, str]]) -> list[Any]:
    """What a new family reads of each model: facts, and the tokens of a prompt."""
    family = resolve_import_string(factory)(options)
    found = []
    for source, text in asked:
        facts = family.facts(source)
        rendered = family.renderer(family.load_tokenizer(source)).prompt(text)
        found.append((facts, dict(facts.config), rendered.text, rendered.token_ids.tolist()))
    return found
