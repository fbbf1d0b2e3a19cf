from __future__ import annotations

from dataclasses import replace

import pytest

from chatlearn_core.plugins.records import (
    CliCommandSpec,
    GeneratorSpec,
    LauncherSpec,
    ModelFamilySpec,
    PluginRecord,
    RewardSpec,
    TrainerSpec,
    WeightSyncSpec,
)
from chatlearn_core.plugins.validation import (
    api_version_problem,
    name_problem,
    record_problems,
    short,
    wrong_type_problem,
)

GENERATOR = GeneratorSpec(name="acme", factory="acme:Generator", options="acme:Options")
LAUNCHER = LauncherSpec(name="acme", function="acme:launcher", recognised_by=("RANK",), order=1)
SYNC = WeightSyncSpec(name="acme", sender="acme:Sender", receiver="acme:Receiver", options="acme:Options")


@pytest.mark.parametrize("name", ["a", "vllm", "dr_grpo", "acme.v2", "cuda_ipc", "7b-judge"])
def test_names(name: str) -> None:
    assert name_problem(name) is None


@pytest.mark.parametrize("name", ["", "Vllm", "a b", "a__b", "_a", "a-", "a/b", "é", "auto", None, 3])
def test_what_is_no_name(name: object) -> None:
    problem = name_problem(name)
    assert problem is not None
    assert repr(name) in problem


@pytest.mark.parametrize("name", ["report", "plugins check"])
def test_names_of_commands(name: str) -> None:
    assert record_problems(CliCommandSpec(name=name, app="acme.cli:app")) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("config check", "name 'config check': only these commands take others below them: plugins"),
        ("plugins check all", "name 'check all': a name is lower-case letters and digits"),
        ("plugins ", "name '': a name is lower-case letters and digits"),
        (" check", "name ' check': only these commands take others"),
        (None, "name None: a name is"),
    ],
)
def test_what_is_no_name_of_a_command(name: str, problem: str) -> None:
    (found,) = record_problems(CliCommandSpec(name=name, app="acme.cli:app"))
    assert found.startswith(problem)


def test_good_records_have_no_problem() -> None:
    trainer = TrainerSpec(name="acme", factory="acme:Trainer", options="acme:Options", exports=frozenset({"boxes"}))
    for record in (GENERATOR, SYNC, LAUNCHER, trainer):
        assert record_problems(record) == []
    assert record_problems(replace(GENERATOR, model_families=frozenset({"qwen3"}))) == []


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (replace(GENERATOR, channels=frozenset({"tensor"})), "channels holds 'tensor': known are tensors, boxes,"),
        (replace(GENERATOR, channels="tensors"), "channels=a str: 'tensors': must be a frozenset of strings"),
        (replace(GENERATOR, options=None), "options: None is a NoneType"),
        (replace(SYNC, receiver="acme.Receiver"), "receiver: 'acme.Receiver' is not an import string"),
        (
            ModelFamilySpec(name="f", factory="a:F", options="a:O", layouts={"megatron": "acme.SEED"}),
            "layouts['megatron']: 'acme.SEED' is not an import string",
        ),
        (replace(SYNC, reach="galaxy"), "reach='galaxy': must be one of process, host, anywhere"),
        (replace(SYNC, channels=("carrier_pigeon",)), "channels holds 'carrier_pigeon': known are tensors, boxes,"),
        (replace(SYNC, channels=()), "channels=a tuple: (): must be a tuple with at least one of tensors, boxes,"),
        (replace(SYNC, channels=frozenset({"tensors"})), "channels=a frozenset: frozenset({'tensors'}): must be a"),
        (replace(SYNC, channels=("boxes", "boxes")), "channels=a tuple: ('boxes', 'boxes'): holds a value twice"),
        (
            RewardSpec(name="r", factory="a:F", options="a:O", unit="batch"),
            "unit='batch': must be one of sample, group",
        ),
        (replace(LAUNCHER, order="first"), "order=a str: 'first': must be a whole number"),
        (replace(LAUNCHER, recognised_by="RANK"), "recognised_by=a str: 'RANK': must be a tuple of strings"),
        (replace(LAUNCHER, function="acme.launcher"), "function"),
    ],
)
def test_every_broken_rule_is_named(record: PluginRecord, problem: str) -> None:
    (found,) = record_problems(record)
    assert found.startswith(problem)


def test_all_broken_rules_at_once() -> None:
    assert len(record_problems(replace(SYNC, name="A B", sender="x", reach="galaxy", requires=("torch",)))) == 4


def test_the_wrong_record_is_sent_to_its_own_hook() -> None:
    assert wrong_type_problem(GENERATOR, "chatlearn_generators") is None
    problem = wrong_type_problem(GENERATOR, "chatlearn_trainers")
    assert problem is not None
    assert problem.endswith("it must return TrainerSpec records (GeneratorSpec belongs in chatlearn_generators)")


def test_api_versions() -> None:
    assert api_version_problem(GENERATOR) is None
    assert "'1', this ChatLearn has plugin API 2" in str(api_version_problem(replace(GENERATOR, api_version="1")))


def test_a_value_that_cannot_be_shown_is_still_named() -> None:
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError

    assert short(Rude()) == "a Rude: (its repr raised RuntimeError)"
    assert len(short("x" * 1000)) < 100
