import pytest

from chatlearn_config.document import Document, parse
from chatlearn_config.overrides import apply_overrides
from chatlearn_config.problems import render

TEXT = """\
a:
  b: 1
items:
  - x: 1
  - x: 2
  - x: 3
empty:
text: ${a}
"""


def overridden(*overrides: str) -> Document:
    document = parse(TEXT, "run.yaml")
    apply_overrides(document, overrides)
    return document


def message(override: str) -> str:
    document = overridden(override)
    (problem,) = document.problems
    return render(problem, document.marks)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("'5'", "5"),
        ("1e-4", 1e-4),
        ("true", True),
        ("", None),
        ("null", None),
        ("[1, two]", [1, "two"]),
        ("{k: {l: 1}}", {"k": {"l": 1}}),
        ("a=b", "a=b"),
        ("${items.0.x}", "${items.0.x}"),
        ("${oc.env:HOME,x}", "${oc.env:HOME,x}"),
        ("/data/train.jsonl", "/data/train.jsonl"),
    ],
)
def test_values_are_typed_like_yaml(text: str, value: object) -> None:
    document = overridden(f"a.b={text}")
    assert document.problems == []
    assert document.values["a"]["b"] == value
    assert type(document.values["a"]["b"]) is type(value)


def test_new_sections_are_made_and_empty_ones_filled() -> None:
    document = overridden("p.q.r=1", "empty.k=2")
    assert document.values["p"] == {"q": {"r": 1}}
    assert document.values["empty"] == {"k": 2}
    assert str(document.marks.by_path[("p", "q", "r")]) == "override 'p.q.r=1'"
    assert str(document.marks.by_path[("p",)]) == "override 'p.q.r=1'"


@pytest.mark.parametrize("key", ["items.1.x", "items[1].x"])
def test_list_items_by_index(key: str) -> None:
    document = overridden(f"{key}=9")
    assert document.values["items"] == [{"x": 1}, {"x": 9}, {"x": 3}]
    assert str(document.marks.locate(("items", 1, "x"))) == f"override '{key}=9'"
    assert str(document.marks.locate(("items", 2, "x"))) == "run.yaml:6"


def test_index_one_past_the_end_appends() -> None:
    document = overridden("items.3.x=4", "items.4=5")
    assert document.values["items"][3:] == [{"x": 4}, 5]


def test_index_0_of_a_list_that_is_not_there_begins_it() -> None:
    document = overridden("log.loggers.0.name=tensorboard", "log.loggers.1.name=wandb")
    assert document.values["log"] == {"loggers": [{"name": "tensorboard"}, {"name": "wandb"}]}


def test_a_mapping_replaces_and_its_keys_point_to_the_override() -> None:
    document = overridden("a={c: 2}")
    assert document.values["a"] == {"c": 2}
    assert ("a", "b") not in document.marks.by_path
    assert str(document.marks.by_path[("a", "c")]) == "override 'a={c: 2}'"


def test_later_overrides_win() -> None:
    assert overridden("a.b=2", "a.b=3").values["a"]["b"] == 3


def test_delete_a_key_and_a_list_item() -> None:
    document = overridden("~a.b", "~items.0")
    assert document.values["a"] == {}
    assert document.values["items"] == [{"x": 2}, {"x": 3}]
    assert str(document.marks.locate(("items", 0, "x"))) == "run.yaml:5"
    assert str(document.marks.locate(("items", 1, "x"))) == "run.yaml:6"
    assert ("items", 2) not in document.marks.by_path


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "a.b",
            "override 'a.b': (top level): an override has no '='\n    write key=value to set a key, ~key to delete it",
        ),
        (
            "a..b=1",
            "override 'a..b=1': (top level): 'a..b' is no dotted key\n    write key=value, such as train.steps=10",
        ),
        ("=1", "override '=1': (top level): '' is no dotted key\n    write key=value, such as train.steps=10"),
        (
            "items.7.x=1",
            "override 'items.7.x=1': items.7: items is a list of 3: '7' is no index of it\n"
            "    use 0 to 3 (the last one appends)",
        ),
        (
            "items.x=1",
            "override 'items.x=1': items.x: items is a list of 3: 'x' is no index of it\n"
            "    use 0 to 3 (the last one appends)",
        ),
        (
            "text.b=1",
            "override 'text.b=1': text.b: text is '${a}' (run.yaml:8), which has no keys below it\n"
            "    override text itself with a mapping",
        ),
        ("~a.c", "override '~a.c': a.c: there is no such key to delete"),
        ("~item", "override '~item': item: there is no such key to delete\n    did you mean 'items'?"),
        ("~items.3", "override '~items.3': items.3: there is no such key to delete"),
        ("a.b={x: 1, x: 2}", "override 'a.b={x: 1, x: 2}': a.b: the value is not usable: the key is written twice"),
        ("a.b=[1", "override 'a.b=[1': a.b: the value cannot be read: value:1:3: not valid YAML"),
    ],
)
def test_wrong_overrides(override: str, expected: str) -> None:
    assert message(override).startswith(expected)


def test_wrong_overrides_are_collected() -> None:
    assert len(overridden("a", "b.c.d", "a.b=2", "~x").problems) == 3


def test_a_key_of_thousands_of_parts_is_refused() -> None:
    text = message(".".join(["a"] * 3000) + "=1")
    assert "(top level): the key has 3000 parts; a configuration is at most 64 levels deep" in text
    assert len(text) < 500
