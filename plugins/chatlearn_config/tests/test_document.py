import math

import pytest

from chatlearn_config.document import DocumentError, parse, read_text


def fatal(text: str) -> str:
    with pytest.raises(DocumentError) as caught:
        parse(text, "run.yaml", ("model", "data"))
    return str(caught.value)


def told(text: str) -> list[tuple[tuple, str]]:
    return [(problem.path, problem.rule) for problem in parse(text, "run.yaml").problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),  # YAML 1.2; PyYAML alone reads text
        ("1.5E+3", 1500.0),
        (".5", 0.5),
        ("-3", -3),
        ("1_000", 1000),
        ("0x1F", 31),
        (".inf", math.inf),
        ("12:30", "12:30"),  # sexagesimal in YAML 1.1
        ("2024-01-31", "2024-01-31"),  # a date in YAML 1.1
        ("007", "007"),  # octal in YAML 1.1
        ("yes", True),
        ("~", None),
        ("'1'", "1"),
        ("e4", "e4"),
        ("1.0.0", "1.0.0"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    read = parse(f"a: {text}", "run.yaml").values["a"]
    assert read == value
    assert type(read) is type(value)


def test_every_key_and_item_has_its_line() -> None:
    text = (
        "a:\n  b:\n    - x: 1\n      y: 2\n    -\n      - 7\n      - {p: 1,\n         q: 2}\n"
        "c: |\n  long\n  text\nd: 1\n"
    )
    marks = parse(text, "run.yaml").marks
    lines = {path: mark.line for path, mark in marks.by_path.items()}
    assert lines == {
        (): 1,
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "b", 0): 3,
        ("a", "b", 0, "x"): 3,
        ("a", "b", 0, "y"): 4,
        ("a", "b", 1): 6,
        ("a", "b", 1, 0): 6,
        ("a", "b", 1, 1): 7,
        ("a", "b", 1, 1, "p"): 7,
        ("a", "b", 1, 1, "q"): 8,
        ("c",): 9,
        ("d",): 12,
    }
    assert str(marks.locate(("a", "b", 1, 1, "absent"))) == "run.yaml:7"


def test_merge_keys_give_way_to_own_keys_and_point_to_where_they_were_written() -> None:
    document = parse("base: &b {x: 1, y: 2}\nsection:\n  y: 3\n  <<: *b\n", "run.yaml")
    assert document.values["section"] == {"x": 1, "y": 3}
    assert document.problems == []
    assert document.marks.by_path[("section", "x")].line == 1
    assert document.marks.by_path[("section", "y")].line == 3


def test_of_several_merged_mappings_the_first_wins() -> None:
    document = parse("a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc:\n  <<: [*a, *b]\n", "run.yaml")
    assert document.values["c"] == {"x": 1, "y": 2}


def test_duplicate_keys_name_both_lines_at_every_level() -> None:
    assert told("a: 1\nb:\n  - c: 1\n    d: 2\n    c: 3\na: 2\n") == [
        (("b", 0, "c"), "the key is written twice, in lines 3 and 5"),
        (("a",), "the key is written twice, in lines 1 and 6"),
    ]


@pytest.mark.parametrize(
    ("text", "path", "rule"),
    [
        ("a: !!python/name:os.system x", ("a",), "the tag 'tag:yaml.org,2002:python/name:os.system' is not supported"),
        ("a: !acme [1]", ("a",), "the tag '!acme' is not supported"),
        ("a: {null: 1}", ("a", "null"), "a key must be text or a whole number"),
        ("a: {[1, 2]: 1}", ("a", "(SequenceNode)"), "a key must be text or a whole number"),
        ("a: {1.5: 1}", ("a", "1.5"), "a key must be text or a whole number"),
        ("a: 99999999999999999999", ("a",), "the number does not fit into 64 bits"),
        ('a: "\\ud800"', ("a",), "holds half of a surrogate pair, which is no character"),
        ("a: !!int x", ("a",), "cannot be read as int: invalid literal for int() with base 10: 'x'"),
        ("a: {<<: 3}", ("a",), "'<<' merges mappings only"),
    ],
)
def test_values_that_cannot_be_used(text: str, path: tuple, rule: str) -> None:
    assert told(text) == [(path, rule)]


def test_syntax_error_names_line_and_column() -> None:
    assert fatal("a: 1\nb: [1,\nc: 2\n") == (
        "run.yaml:4:1: not valid YAML: while parsing a flow sequence (begun in line 2) expected ',' or ']', "
        "but got '<stream end>'"
    )


def test_tab_indentation_names_the_line() -> None:
    assert fatal("a:\n\tb: 1\n").startswith("run.yaml:2:1: not valid YAML:")


def test_two_documents_are_refused() -> None:
    assert "run.yaml:2:1: not valid YAML: expected a single document" in fatal("a: 1\n---\nb: 2\n")


def test_control_character_names_the_line() -> None:
    assert fatal("a: 1\nb: \x07\n").startswith("run.yaml:2: character ")


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n"])
def test_empty_file(text: str) -> None:
    message = fatal(text)
    assert message.startswith("run.yaml")
    assert "empty" in message or "the top level is null" in message


@pytest.mark.parametrize(("text", "what"), [("- 1\n", "a list"), ("\nhello\n", "text"), ("3\n", "a number")])
def test_top_level_must_be_a_mapping(text: str, what: str) -> None:
    line = 2 if text.startswith("\n") else 1
    assert fatal(text).startswith(f"run.yaml:{line}: the top level is {what}; it must be a mapping (model: ...")


def test_alias_that_contains_itself() -> None:
    assert fatal("a: &x\n  b: *x\n") == "run.yaml:2: a.b: an alias that contains itself"
    assert "an alias that contains itself" in fatal("a: &x\n  <<: *x\n")


def test_alias_bomb_is_refused() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 8)]
    assert "more than 100000 values once aliases are expanded" in fatal("\n".join(lines))


@pytest.mark.parametrize("depth", [100, 50_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    assert "nested too deeply; at most 64 levels are read" in fatal("[" * depth + "]" * depth)


def test_read_text(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: \xc3\xa4\n")
    assert read_text(path) == "a: ä\n"


def test_file_that_is_not_utf8_names_the_line(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes("a: 1\nname: Zürich\n".encode("latin-1"))
    with pytest.raises(DocumentError, match=r"run\.yaml:2: byte 0xfc is not UTF-8; .* save it as such"):
        read_text(path)


def test_missing_file_suggests_a_similar_one(tmp_path) -> None:
    (tmp_path / "gsm8k_grpo.yaml").write_text("")
    with pytest.raises(DocumentError) as caught:
        read_text(tmp_path / "gsm8k-grpo.yml")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/gsm8k-grpo.yml: there is no such configuration file")
    assert message.endswith(f"Did you mean '{tmp_path}/gsm8k_grpo.yaml'?")


def test_missing_file_in_missing_directory(tmp_path) -> None:
    with pytest.raises(DocumentError, match="there is no such configuration file"):
        read_text(tmp_path / "no" / "run.yaml")


def test_directory_and_impossible_name(tmp_path) -> None:
    with pytest.raises(DocumentError, match="cannot be read: Is a directory"):
        read_text(tmp_path)
    with pytest.raises(DocumentError, match="cannot be read: embedded null"):
        read_text(tmp_path / "a\0b")
