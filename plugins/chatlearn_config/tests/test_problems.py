import pytest

from chatlearn_config.problems import (
    Mark,
    Marks,
    Problem,
    in_order,
    nearest,
    overlaps,
    render,
    show_path,
    unknown_key,
)

MARKS = Marks(
    "run.yaml",
    {
        (): Mark("run.yaml", 1),
        ("a",): Mark("run.yaml", 2),
        ("a", "b"): Mark("run.yaml", 3),
        ("c",): Mark("override 'c=1'"),
    },
)


def test_a_conflict_shows_both_sides_and_the_fix() -> None:
    problem = Problem(
        ("a", "b"), "first line\nsecond line", 5, "do this\nor that", ((("c",), 1), (("a", "unset"), "x"))
    )
    assert render(problem, MARKS) == (
        "run.yaml:3: a.b: first line (got 5)\n"
        "    second line\n"
        "    c = 1 (override 'c=1')\n"
        "    a.unset = 'x' (default)\n"
        "    do this\n"
        "    or that"
    )


def test_a_key_that_is_not_written_is_located_by_its_section() -> None:
    assert render(Problem(("a", "missing"), "required"), MARKS) == "run.yaml:2: a.missing: required"
    assert render(Problem(("z",), "required"), MARKS) == "run.yaml:1: z: required"
    assert render(Problem((), "odd"), Marks("run.yaml")) == "run.yaml: (top level): odd"


def test_long_values_are_cut() -> None:
    line = render(Problem(("a",), "too long", "x" * 1000), MARKS)
    assert line == f"run.yaml:2: a: too long (got 'xxxxx{'x' * 91}...)"


def test_unknown_key_names_the_nearest_and_all_valid_keys() -> None:
    problem = unknown_key(("a", "max_tokens_per_microbatch"), 4096, ["lr", "max_tokens_per_micro_batch"])
    assert render(problem, MARKS) == (
        "run.yaml:2: a.max_tokens_per_microbatch: unknown key (got 4096)\n"
        "    did you mean 'max_tokens_per_micro_batch'?\n"
        "    valid keys: lr, max_tokens_per_micro_batch"
    )
    assert "this section takes no keys" in render(unknown_key(("a", "x"), 1, []), MARKS)


@pytest.mark.parametrize(
    ("key", "valid", "meant"),
    [
        ("backend", ["name", "options"], "name"),
        ("backend", ["path", "format", "name"], "format"),
        ("name", ["kind", "backend"], "backend"),
        ("name", ["names", "kind"], "names"),
        ("backend", ["lr"], None),
    ],
)
def test_an_unknown_key_may_be_what_another_section_calls_the_same(
    key: str, valid: list[str], meant: str | None
) -> None:
    hint = unknown_key(("a", key), "x", valid).remedy.split("\n")[0]
    assert hint == (f"did you mean '{meant}'?" if meant else "")


def test_problems_are_ordered_by_line_and_overrides_come_last() -> None:
    problems = [Problem(("c",), "third"), Problem(("a", "b"), "second"), Problem(("a",), "first")]
    assert [problem.rule for problem in in_order(problems, MARKS)] == ["first", "second", "third"]


def test_nearest() -> None:
    assert nearest("bakend", ["backend", "kind"]) == "backend"
    assert nearest("Group-Size", ["group_size"]) == "group_size"
    assert nearest("zzz", ["backend"]) is None


def test_show_path_quotes_odd_keys() -> None:
    assert show_path(("data", "train", 0, "a b\n", "x-y")) == "data.train.0.'a b\\n'.x-y"


def test_overlaps() -> None:
    assert overlaps(("a",), ("a", "b"))
    assert overlaps(("a", "b"), ("a",))
    assert not overlaps(("a", "b"), ("a", "c"))
