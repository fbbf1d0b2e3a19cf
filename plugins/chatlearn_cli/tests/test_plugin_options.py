from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from chatlearn_cli.plugin_options import OptionRow, option_rows, options_text


class Inner(BaseModel):
    rate: float = Field(0.5, gt=0, le=1)


class Options(BaseModel):
    path: str = Field(description="Where it is.")
    mode: Literal["a", "b"] = "a"
    limit: Annotated[int, Field(ge=1)] | None = None
    clip: float | None = Field(1.0, gt=0)
    words: list[str] = Field(default_factory=lambda: ["x"], min_length=1)
    strict: bool = True
    inner: Inner = Inner()


def test_every_option_with_type_default_and_description() -> None:
    assert option_rows(Options) == [
        OptionRow("path", "str", "required", "Where it is."),
        OptionRow("mode", "a | b", "a", ""),
        OptionRow("limit", "int >= 1 | null", "null", ""),
        OptionRow("clip", "float > 0 | null", "1.0", ""),
        OptionRow("words", "list[str] (at least 1 long)", "['x']", ""),
        OptionRow("strict", "bool", "true", ""),
        OptionRow("inner", "Inner", "see below", ""),
        OptionRow("inner.rate", "float > 0 <= 1", "0.5", ""),
    ]


def test_a_long_default_of_several_lines_is_shortened_to_one() -> None:
    class Template(BaseModel):
        short: str = "a\nb"
        long: str = "Question:\n" + 80 * "x"

    short, long = option_rows(Template)
    assert short.default == '"a\\nb"'
    assert long.default == '"Question:\\n' + 45 * "x" + "..."
    assert len(long.default) == 60


def test_a_model_without_options() -> None:
    class Empty(BaseModel):
        pass

    assert options_text(option_rows(Empty)) == "no options"
