import pytest

from chatlearn_config.interpolation import resolve
from chatlearn_core.config.models import RunConfig


def problems(values: dict) -> list[tuple[tuple, str, str]]:
    return [(problem.path, problem.rule, problem.remedy) for problem in resolve(values, RunConfig)[1]]


def resolved(values: dict) -> dict:
    result, found, _ = resolve(values, RunConfig)
    assert found == []
    return result


def test_plain_values_pass_unchanged() -> None:
    values = {"name": "x", "output_dir": "out", "roles": {"a": {"options": {"list": [1, None, {"b": 2.5}]}}}}
    assert resolved(values) == values


def test_types_are_kept_and_text_is_composed() -> None:
    values = {"train": {"steps": 10}, "copy": "${train.steps}", "text": "n=${train.steps}", "section": "${train}"}
    result = resolved(values)
    assert result["copy"] == 10
    assert result["text"] == "n=10"
    assert result["section"] == {"steps": 10, "mini_batches": 1, "epochs": 1, "step_policies": []}


def test_relative_items_and_nested() -> None:
    result = resolved({"a": {"b": 1, "c": "${.b}", "d": ["${..b}", "${a.c}"]}, "key": "b", "e": "${a.${key}}"})
    assert result["a"] == {"b": 1, "c": 1, "d": [1, 1]}
    assert result["e"] == 1


def test_a_default_can_be_named_though_the_file_does_not_set_it() -> None:
    result = resolved({"eval": {"sampling": {"max_tokens": "${sampling.max_tokens}"}}, "roles": {"a": {}}})
    assert result["eval"] == {"sampling": {"max_tokens": 512}}
    assert "sampling" not in result


def test_the_default_output_directory_follows_the_name() -> None:
    assert resolved({"name": "first"})["output_dir"] == "runs/first"
    assert resolved({})["output_dir"] == "runs/run"
    assert resolved({"output_dir": "x"})["output_dir"] == "x"


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_STEPS", "7")
    monkeypatch.delenv("ACME_NONE", raising=False)
    result = resolved(
        {"a": "${oc.env:ACME_STEPS}", "b": "${oc.decode:${oc.env:ACME_STEPS}}", "c": "${oc.env:ACME_NONE,d}"}
    )
    assert (result["a"], result["b"], result["c"]) == ("7", 7, "d")
    assert problems({"a": {"b": "${oc.env:ACME_NONE}"}}) == [
        (
            ("a", "b"),
            "the interpolation fails: Environment variable 'ACME_NONE' not found",
            "export it, or give a default: ${oc.env:NAME,default}",
        )
    ]


def test_escaped_interpolation_is_text() -> None:
    assert resolved({"a": "\\${name}"})["a"] == "${name}"


def test_every_failure_is_told() -> None:
    found = problems(
        {
            "train": {"steps": "${train.stesp}", "epochs": "${nowhere.at.all}"},
            "list": [1, "${b"],
            "c": "${acme:1}",
            "d": "???",
            "e": "${d}",
        }
    )
    assert [(path, rule) for path, rule, _ in found] == [
        (("list", 1), "malformed interpolation: no viable alternative at input '${b'"),
        (("train", "steps"), "Interpolation key 'train.stesp' not found"),
        (("train", "epochs"), "Interpolation key 'nowhere.at.all' not found"),
        (("c",), "the interpolation fails: Unsupported interpolation type acme"),
        (("d",), "'???' marks a value that must be set"),
        (("e",), "the interpolation reaches a value that must be set ('???')"),
    ]
    assert found[1][2] == "did you mean 'train.steps'?"


@pytest.mark.parametrize(
    "values",
    [
        {"a": "${a}"},
        {"a": "${b}", "b": "x ${c}", "c": "${a}"},
        {"a": {"b": "${a}"}},
        {"a": {"b": "${.b.c}"}},
        {"a": ["${a}"]},
    ],
)
def test_cycles(values: dict) -> None:
    found = problems(values)
    assert found
    assert {rule for _, rule, _ in found} == {"the interpolation leads back to itself"}


def test_what_failed_is_left_out_and_named() -> None:
    values, _, failed = resolve({"name": "x", "seed": "${nope}", "items": [1, "${nope}"]}, RunConfig)
    assert values == {"name": "x", "items": [1, None], "output_dir": "runs/x"}
    assert failed == [("seed",), ("items", 1)]
