"""The contract of a family's layouts: a trainer with layers of its own holds the checkpoint, all of it, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.model_directory import read_checkpoint
from chatlearn_testing.other_process import in_another_process
from chatlearn_testing.suites.conformance_suite import installed_plugins
from chatlearn_testing.suites.model_family_models import BuiltModel, ModelFamilySuite

MAX_HEAD_TENSORS = 2
"""Of a head with one output: weight and bias."""


class LayoutContract(ModelFamilySuite):
    """Contract tests of ``ModelFamilySpec.layouts``.

    A subclass sets ``round_trips`` for a record with ``layouts``. What loads and reads a layout belongs to its trainer,
    whose distribution has such a function.
    """

    settable: ClassVar[frozenset[str]] = frozenset({"round_trips"})
    round_trips: ClassVar[Mapping[str, str]] = {}
    """Name of the trainer -> import string of ``round_trip(layout, directory, head) -> tensors by checkpoint name``:
    puts the weights of a model directory into the trainer's layers as the layout says, and reads them back. It is
    called in a process of its own."""

    def test_layouts_can_be_imported(self) -> None:
        """Every import string in ``layouts`` names something."""
        if not self.record().layouts:
            not_applicable("the record has no layouts")
        for trainer, layout in self.record().layouts.items():
            found = in_another_process(_type_name, layout, limit_s=self.patience_s)
            assert found != "NoneType", f"the layout {layout!r} for the trainer {trainer!r} is None"

    def test_every_layout_can_be_tested(self) -> None:
        """``round_trips`` has a function for each trainer in ``layouts``, and for no other."""
        layouts, given = set(self.record().layouts), set(self.round_trips)
        assert layouts == given, f"the record has layouts for {sorted(layouts)}, round_trips are for {sorted(given)}"

    def test_layouts_hold_the_whole_checkpoint(self, trips: Mapping[tuple[str, str, str], Path]) -> None:
        """What was loaded comes back under the checkpoint's names, every tensor once, with its shape, type and bits."""
        for (trainer, model, _), found, expected in self._read_back(trips, "lm"):
            what = f"{trainer}, {model}"
            missing, new = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
            assert not missing, f"{what}: {', '.join(missing[:4])} of the checkpoint do not come back"
            assert not new, f"{what}: {', '.join(new[:4])} are not in the checkpoint"
            for name, tensor in expected.items():
                self._assert_same_bits(found[name], tensor, f"{what}: {name}")

    def test_layouts_name_the_other_heads(self, trips: Mapping[tuple[str, str, str], Path]) -> None:
        """With a head of one output, as the trainer's record promises, everything but the head comes back bit for bit,
        and the new head has one row. A trainer may refuse one of its heads with a ``ModelError``, because an
        architecture may lack it, but not all.
        """
        for (trainer, model, head), found, expected in self._read_back(trips, "value", "reward"):
            what = f"{trainer}, {model}, head {head!r}"
            lost = {name: expected[name] for name in expected.keys() - found.keys()}
            added = {name: found[name] for name in found.keys() - expected.keys()}
            vocabulary = max(tensor.shape[0] for tensor in expected.values())
            wrong = [name for name, tensor in lost.items() if tensor.shape[0] != vocabulary]
            assert not wrong, f"{what}: {', '.join(sorted(wrong)[:4])} do not come back, and are no output layer"
            assert 1 <= len(added) <= MAX_HEAD_TENSORS, f"{what}: the head's tensors are {sorted(added)}"
            wide = [name for name, tensor in added.items() if tensor.shape[0] != 1]
            assert not wide, f"{what}: {wide[0]} of the head has {added[wide[0]].shape[0]} rows, not 1"
            for name in expected.keys() & found.keys():
                self._assert_same_bits(found[name], expected[name], f"{what}: {name}")

    def test_layouts_refuse_an_incomplete_checkpoint(self, models: Sequence[BuiltModel], tmp_path: Path) -> None:
        """A checkpoint that lacks a tensor, or has one of another shape, is an error that names it, not zeros."""
        if not self.round_trips:
            not_applicable("the record has no layouts")
        jobs, damaged = [], []
        for number, model in enumerate(models[:1]):
            tensors = read_checkpoint(model.directory)
            name = sorted(name for name, tensor in tensors.items() if tensor.dim() == 2 and "embed" not in name)[0]
            less = {key: tensor for key, tensor in tensors.items() if key != name}
            for what, content in (("lacks", less), ("shape", less | {name: tensors[name][:-1].clone()})):
                directory = model.copy(tmp_path / f"{what}-{number}")
                _write_weights(directory, content)
                damaged += [(what, name)] * len(self.round_trips)
                jobs += [
                    (t, self.record().layouts[t], f, str(directory), "lm", "") for t, f in self.round_trips.items()
                ]
        answers = in_another_process(_round_trips, jobs, limit_s=self.patience_s)
        for (what, name), answer in zip(damaged, answers, strict=True):
            assert answer, f"a checkpoint in which {name} {what} loads"
            kind, message = answer
            assert kind == "ChatLearnError", f"a checkpoint in which {name} {what} raises {kind}: {message}"
            assert name in message, f"{message!r} does not name {name}"

    # Internal methods

    @pytest.fixture(scope="class")
    @classmethod
    def trips(
        cls, models: Sequence[BuiltModel], tmp_path_factory: pytest.TempPathFactory
    ) -> Mapping[tuple[str, str, str], Path]:
        """(trainer, model type, head) -> file with the tensors that came back. All round trips are in one process."""
        record = cls.record()
        if not record.layouts:
            not_applicable("the record has no layouts")
        root, jobs, files = tmp_path_factory.mktemp("trips"), [], {}
        for trainer, function in cls.round_trips.items():
            for number, model in enumerate(models):
                for head in _heads(trainer):
                    file = root / f"{trainer}-{number}-{head}.safetensors"
                    files[trainer, model.case.model_type, head] = file
                    jobs.append((trainer, record.layouts[trainer], function, str(model.directory), head, str(file)))
        answers = in_another_process(_round_trips, jobs, limit_s=cls.patience_s * max(1, len(jobs)))
        held = {key[:2] for key, answer in zip(files, answers, strict=True) if answer is None and key[2] != "lm"}
        for key, answer in zip(tuple(files), answers, strict=True):
            if answer is None:
                continue
            refused = answer[0] == "ChatLearnError" and key[2] != "lm" and key[:2] in held
            assert refused, f"{', '.join(key)}: {answer[0]}: {answer[1]}"
            del files[key]
        cls._checkpoints = {model.case.model_type: read_checkpoint(model.directory) for model in models}
        return files

    _checkpoints: ClassVar[Mapping[str, Mapping[str, Tensor]]] = {}

    def _read_back(
        self, trips: Mapping[tuple[str, str, str], Path], *heads: str
    ) -> list[tuple[tuple[str, str, str], dict[str, Tensor], Mapping[str, Tensor]]]:
        """(key, tensors that came back, checkpoint) of each round trip with one of these heads."""
        found = [(key, load_file(file), self._checkpoints[key[1]]) for key, file in trips.items() if key[2] in heads]
        if not found:
            not_applicable(f"no trainer of the layouts has a head {' or '.join(heads)}")
        return found

    def _assert_same_bits(self, found: Tensor, expected: Tensor, what: str) -> None:
        assert found.shape == expected.shape, f"{what} has shape {list(found.shape)}, not {list(expected.shape)}"
        assert found.dtype == expected.dtype, f"{what} is {found.dtype}, not {expected.dtype}"
        as_bytes = [tensor.contiguous().view(torch.uint8) for tensor in (found, expected)]
        differ = int((as_bytes[0] != as_bytes[1]).sum())
        assert not differ, f"{what} comes back with {differ} of {as_bytes[0].numel()} bytes changed"


def _heads(trainer: str) -> list[str]:
    """The heads that a trainer's record promises; of a trainer that is not installed, the layers' own."""
    for record in installed_plugins().records("trainer"):
        if record.name == trainer:
            promised: Any = record
            return sorted(promised.heads)
    return ["lm"]


def _type_name(layout: str) -> str:
    return type(resolve_import_string(layout)).__name__


def _round_trips(jobs: Sequence[tuple[str, str, str, str, str, str]]) -> list[tuple[str, str] | None]:
    """In another process: make round trips and write what came back; kind and message of the error of each, or None."""
    answers: list[tuple[str, str] | None] = []
    for trainer, layout, function, directory, head, file in jobs:
        given = resolve_import_string(layout)
        try:
            tensors = resolve_import_string(function)(given, Path(directory), head)
            if file:
                save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, file)
        except ChatLearnError as error:
            answers.append(("ChatLearnError", str(error)))
        except Exception as error:
            answers.append((type(error).__name__, f"{error} (round trip for the trainer {trainer!r})"))
        else:
            answers.append(None)
    return answers


def _write_weights(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
