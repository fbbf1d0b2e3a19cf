"""Describes in words how the rows of a dataset are interpreted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from chatlearn_core.data.format import DatasetFormat, RawExample, parse_row
from chatlearn_core.data.reader import LocatedRow, read_rows
from chatlearn_core.data.report import control_tokens_text
from chatlearn_core.data.selection import detect_format, row_readers, select_format
from chatlearn_core.exceptions import ConfigError, DataError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import ModelSource
from chatlearn_core.protocols.prompt_renderer import PromptRenderer

_CONTROL_TOKENS = re.compile(r"<\|[^|<>\s]{1,40}\|>|</?s>|<(?:bos|eos|start_of_turn|end_of_turn)>|\[/?INST\]")
"""Spellings of control tokens in common models."""


def described_rows(path: str, num: int, format: str, split: str | None, model: str | None = None) -> Iterator[str]:
    """Yield a paragraph for each of the first ``num`` rows: position, id, prompt, answer, completion; and one on
    control tokens.

    The latter covers the control tokens of ``model`` in all rows, or likely control tokens in the shown rows.

    Raises:
        DataError: the dataset cannot be read, is empty, or no format fits it.
        ModelError: ``model`` has no tokenizer.
        PluginError: the format is unknown.
    """
    plugins = discover_plugins()
    renderer = None if model is None else _renderer(plugins, model)
    rows = read_rows(path, split, row_readers(plugins))
    first = next(rows, None)
    if first is None:
        raise DataError(f"Data file '{path}' is empty: it has no row.")
    name = format
    if name == "auto":
        if first.row is None:
            raise DataError(f"{first.place}: {first.error}")
        name = detect_format(plugins, first.row, "dataset")
    row_format = select_format(plugins, name, {}, "dataset")
    rows = chain([first], rows)
    shown: list[RawExample] = []
    for located in islice(rows, num):
        yield f"{located.place} (format {name})"
        try:
            raw = _parsed(located, row_format)
        except DataError as error:
            yield f"  bad row: {error}\n"
            continue
        shown.append(raw)
        for title, value in [
            ("id", raw.id),
            ("data_source", raw.data_source),
            *_turns(raw.prompt),
            ("ground truth", raw.ground_truth),
            *(_compared(raw) or _completion(raw.completion)),
            ("tools", ", ".join(map(_tool_name, raw.tools)) or None),
            ("columns", ", ".join(raw.columns)),
        ]:
            if value is not None:
                yield f"  {title}: {_printable(value)}"
        yield ""
    if renderer is not None:
        others = (_parsed_or_none(located, row_format) for located in rows)
        found = [
            renderer.spelled_control_tokens(one.prompt, one.completion, one.completions)
            for one in chain(shown, others)
            if one
        ]
        yield from _told(found)
    else:
        found = [
            tuple(dict.fromkeys(_CONTROL_TOKENS.findall(f"{raw.prompt}{raw.completion}{raw.completions}")))
            for raw in shown
        ]
        yield from _told(found, "; --model PATH counts those of its tokenizer in all rows")


def _texts(raw: RawExample) -> tuple[Any, ...]:
    return raw.prompt, raw.completion, list(raw.completions)


def _told(found: list[tuple[str, ...]], more: str = "") -> Iterator[str]:
    rows = [tokens for tokens in found if tokens]
    if rows:
        counts = Counter(token for tokens in rows for token in tokens)
        yield control_tokens_text(len(rows), len(found), counts, "text") + more


def _parsed(located: LocatedRow, row_format: DatasetFormat) -> RawExample:
    if located.row is None:
        raise DataError(located.error or "no row")
    return parse_row(row_format, located.row)


def _parsed_or_none(located: LocatedRow, row_format: DatasetFormat) -> RawExample | None:
    try:
        return _parsed(located, row_format)
    except DataError:
        return None  # a run reports it; this command reports only the shown rows


def _turns(prompt: Any) -> list[tuple[str, Any]]:
    """Return a prompt as titled lines; items that are not messages are shown unchanged."""
    if not isinstance(prompt, list | tuple):
        return [("prompt", prompt)]
    return [
        (str(turn["role"]), turn["content"])
        if isinstance(turn, dict) and {"role", "content"} <= turn.keys()
        else ("no message", turn)
        for turn in prompt
    ]


def _completion(completion: Any) -> list[tuple[str, Any]]:
    """Return a completion as titled lines."""
    if not isinstance(completion, list | tuple):
        return [("completion", completion)]
    return [(f"completion ({role})", content) for role, content in _turns(completion)]


def _compared(raw: RawExample) -> list[tuple[str, Any]]:
    """Return the compared completions as titled lines."""
    lines: list[tuple[str, Any]] = []
    for index, completion in enumerate(raw.completions):
        verdict = f"rank {raw.ranks[index]:g}" if index < len(raw.ranks) else "label missing"
        if index < len(raw.labels):
            verdict = f"label {raw.labels[index]}"
        lines += [(f"{title}, {verdict}", content) for title, content in _completion(completion)]
    return lines


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else tool
    return str(function.get("name", function) if isinstance(function, dict) else function)


def _printable(value: Any) -> str:
    """Escape characters that a terminal would act on, and lone surrogates."""
    text = "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in str(value))
    return text.encode("utf-8", "backslashreplace").decode()


def _renderer(plugins: PluginRegistry, model: str) -> PromptRenderer:
    general = [record for record in plugins.records("model_family") if not record.model_types]
    if not general:
        raise ConfigError(
            "no installed plugin reads model directories, so --model cannot be used; install chatlearn-hf"
        )
    record = plugins.select("model_family", general[0].name, "--model")
    family = plugins.load_factory(record)(plugins.load_options(record)())
    renderer: PromptRenderer = family.renderer(family.load_tokenizer(ModelSource(path=model, tokenizer_path=model)))
    return renderer
