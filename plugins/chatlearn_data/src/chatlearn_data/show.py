"""How the rows of a dataset are understood, in words."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from chatlearn_core.data.reader import read_rows
from chatlearn_core.data.selection import detect_format, row_readers, select_format
from chatlearn_core.exceptions import DataError
from chatlearn_core.plugins.loader import discover_plugins


def described_rows(path: str, num: int, format: str, split: str | None) -> Iterator[str]:
    """One paragraph for each of the first ``num`` rows: where it stands, id, prompt, answer, completion.

    Raises:
        DataError: the dataset cannot be read, is empty, or no format fits it.
        PluginError: an unknown format.
    """
    plugins = discover_plugins()
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
    for located in islice(chain([first], rows), num):
        yield f"{located.place} (format {name})"
        try:
            if located.row is None:
                raise DataError(located.error or "no row")
            raw = row_format.parse(located.row)
        except DataError as error:
            yield f"  bad row: {error}\n"
            continue
        if isinstance(raw.prompt, str):
            chat = [("prompt", raw.prompt)]
        else:
            chat = [(message["role"], message["content"]) for message in raw.prompt]
        for title, value in [
            ("id", raw.id),
            ("data_source", raw.data_source),
            *chat,
            ("ground truth", raw.ground_truth),
            ("completion", raw.completion),
            ("columns", ", ".join(raw.columns)),
        ]:
            if value is not None:
                yield f"  {title}: {value}"
        yield ""
