from pydantic import BaseModel, ValidationInfo, field_validator

from chatlearn_config.problems import Marks
from chatlearn_core.config.choices import ROLES, choose, plugin_sites, validate_options
from chatlearn_core.plugins.records import TrainerSpec
from chatlearn_core.plugins.registry import PluginRegistry

RECORD = TrainerSpec(name="acme", factory="acme:T", options="acme:O")


class Loose(BaseModel):
    depth: int = 1


class Open(BaseModel, extra="allow"):
    depth: int = 1


class Typed(BaseModel, extra="forbid"):
    pair: tuple[int, int] = (1, 2)
    names: frozenset[str] = frozenset()
    by_rank: dict[int, float] = {}


class Named(BaseModel):
    judge: str

    @field_validator("judge")
    @classmethod
    def _is_a_role(cls, name: str, info: ValidationInfo) -> str:
        if info.context is not None and name not in info.context["roles"]:
            raise ValueError("is no role")
        return name


def test_every_place_that_names_a_plugin_is_a_site() -> None:
    values = {
        "algorithm": {"name": "grpo"},
        "roles": {
            "trainer": {"kind": "trainer", "backend": "fsdp", "options": {"lr": 1}},
            "reward": {"kind": "reward", "parts": [{"backend": "math"}, {"backend": "format"}]},
        },
        "weight_sync": {"backend": "direct"},
        "runtime": {"backend": "ray"},
        "log": {"loggers": [{"name": "console"}]},
        "data": {"train": [{"path": "a"}, {"path": "b", "format": "gsm8k"}], "eval": [{"path": "c", "format": "math"}]},
    }
    assert [(site.key, site.kind, site.name) for site in plugin_sites(values)] == [
        ("algorithm", "algorithm", "grpo"),
        ("roles.trainer", "trainer", "fsdp"),
        ("roles.reward.parts.0", "reward", "math"),
        ("roles.reward.parts.1", "reward", "format"),
        ("weight_sync", "weight_sync", "direct"),
        ("runtime", "runtime", "ray"),
        ("log.loggers.0", "logger", "console"),
        ("data.train.1", "dataset", "gsm8k"),
        ("data.eval.0", "dataset", "math"),
    ]


def test_auto_chooses_nothing_and_the_runtime_has_a_default() -> None:
    values = {"weight_sync": {"backend": "auto"}, "data": {"train": [{"path": "a", "format": "auto"}]}}
    assert [(site.key, site.name) for site in plugin_sites(values)] == [("runtime", "local")]


def test_malformed_places_are_passed_over() -> None:
    values = {"algorithm": 3, "roles": {"a": None, "b": {"kind": "trainer", "backend": 5}}, "log": [], "data": "x"}
    assert [site.key for site in plugin_sites(values)] == ["runtime"]
    assert [site.key for site in plugin_sites({"runtime": None, "roles": [1]})] == []


def test_a_plugin_with_wrong_options_is_found_but_not_selected(registry: PluginRegistry) -> None:
    values = {"roles": {"trainer": {"kind": "trainer", "backend": "fsdp", "options": {"lr": "x"}}}}
    choices = choose(values, registry, Marks("run.yaml"))
    assert list(choices.selected) == ["runtime"]
    assert choices.records["roles.trainer"].name == "fsdp"
    assert [problem.path for problem in choices.problems] == [("roles", "trainer", "options", "lr")]


def test_options_convert_as_json_and_are_strict_about_scalars() -> None:
    options, problems = validate_options(
        Typed, {"pair": [3, 4], "names": ["a"], "by_rank": {0: 1}}, ("options",), RECORD
    )
    assert problems == []
    assert options == Typed(pair=(3, 4), names=frozenset({"a"}), by_rank={0: 1.0})
    options, problems = validate_options(Typed, {"pair": ["3", 4], "by_rank": {0: "x"}}, ("options",), RECORD)
    assert options is None
    assert [problem.path for problem in problems] == [("options", "pair", 0), ("options", "by_rank", 0)]


def test_validators_of_options_know_the_roles() -> None:
    assert validate_options(Named, {"judge": "critic"}, ("options",), RECORD) == (Named(judge="critic"), [])
    context = {ROLES: frozenset({"trainer"})}
    assert validate_options(Named, {"judge": "trainer"}, ("options",), RECORD, context) == (Named(judge="trainer"), [])
    options, problems = validate_options(Named, {"judge": "critic"}, ("options",), RECORD, context)
    assert options is None
    assert [(problem.path, problem.rule) for problem in problems] == [(("options", "judge"), "is no role")]


def test_unknown_keys_are_refused_unless_the_model_wants_them() -> None:
    options, problems = validate_options(Loose, {"dept": 1}, ("options",), RECORD)
    assert options is None
    assert [(problem.path, problem.rule) for problem in problems] == [(("options", "dept"), "unknown key")]
    options, problems = validate_options(Open, {"dept": 1}, ("options",), RECORD)
    assert problems == []
    assert options is not None
    assert options.model_extra == {"dept": 1}


def test_a_plugin_named_under_the_key_of_another_section_is_a_site() -> None:
    """Otherwise what is wrong in its options would be told one run later."""
    values = {
        "algorithm": {"backend": "grpo"},
        "roles": {"trainer": {"kind": "trainer", "name": "fsdp"}},
        "log": {"loggers": [{"backend": "console"}]},
    }
    assert [(site.key, site.name) for site in plugin_sites(values)] == [
        ("algorithm", "grpo"),
        ("roles.trainer", "fsdp"),
        ("runtime", "local"),
        ("log.loggers.0", "console"),
    ]
