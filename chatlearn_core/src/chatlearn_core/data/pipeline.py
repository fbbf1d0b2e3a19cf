"""Turns configured datasets into tokenised examples, and accounts for every row."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from chatlearn_core.data.example_kind import ExampleKind, RowRenderer
from chatlearn_core.data.format import DatasetFormat, parse_row
from chatlearn_core.data.reader import LocatedRow, read_rows
from chatlearn_core.data.report import DatasetReport, bad_rows_error
from chatlearn_core.data.selection import detect_format, row_readers, select_format
from chatlearn_core.data.settings import DatasetSettings, DataSettings, OnBadRow, Split
from chatlearn_core.exceptions import DataError
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols.prompt_renderer import PromptRenderer, TooLongError
from chatlearn_core.types import Example, Prompt

ExampleCheck = Callable[[Prompt], str | None]


@dataclass(slots=True, frozen=True, eq=False)
class Dataset:
    """The examples of one dataset, in stored order."""

    name: str
    weight: float
    """Share among the datasets it is mixed with, relative to their weights."""
    examples: tuple[Example, ...]
    report: DatasetReport

    @property
    def fingerprint(self) -> str:
        """A value that changes whenever an example's id or a token changes."""
        digest = hashlib.sha256()
        for example in self.examples:
            prompt = example.prompt
            digest.update(prompt.id.encode() + b"\0" + prompt.token_ids.tobytes() + b"\0")
            for part in example.content():
                digest.update(part)
        return digest.hexdigest()[:16]


@dataclass(slots=True, frozen=True, eq=False)
class ExampleSet:
    """The datasets of one split of a run."""

    datasets: tuple[Dataset, ...]

    def __len__(self) -> int:
        return sum(len(dataset.examples) for dataset in self.datasets)

    def __iter__(self) -> Iterator[Example]:
        """Every example once, dataset by dataset in stored order, for evaluations."""
        return chain.from_iterable(dataset.examples for dataset in self.datasets)

    @property
    def reports(self) -> tuple[DatasetReport, ...]:
        return tuple(dataset.report for dataset in self.datasets)


def build_dataset(
    config: DataSettings,
    renderer: PromptRenderer,
    plugins: PluginRegistry,
    *,
    kind: ExampleKind,
    max_prompt_tokens: int,
    max_length: int,
    split: Split = "train",
    check: ExampleCheck | Sequence[ExampleCheck] | None = None,
) -> ExampleSet:
    """Read, interpret, render, tokenise and filter the datasets of one split.

    Ids come from the rows, otherwise they are ``{dataset name}/{row number}`` counted from 0 (``eval/...`` in the eval
    split, so that examples of a run never share an id by accident).

    Args:
        config: the ``data`` section.
        renderer: renderer of the policy's model.
        plugins: include the dataset formats and readers.
        kind: kind of the examples to build.
        max_prompt_tokens: longer prompts are filtered out and counted.
        max_length: longest sequence, tokens: also bounds prompt and completion together if examples have both.
        split: which list of ``config`` to build.
        check: returns the reason why the run cannot use a prompt, such as a ground truth that no reward can read, or
            None; a row with an unusable prompt is a bad row. A sequence has one check per dataset.

    Raises:
        DataError: a file is missing, empty or unreadable; there are bad rows and ``config.on_bad_row`` is not ``skip``;
            no example is left.
        ConfigError, PluginError: a format is unknown or rejects its options.
    """
    limits = _Limits(min(max_prompt_tokens, max_length - 1), max_length)
    places: dict[str, str] = {}
    datasets: list[Dataset] = []
    for index, settings in enumerate(config.train if split == "train" else config.eval):
        name = _unique(settings.name or Path(settings.path).stem, {dataset.name for dataset in datasets})
        of_dataset = check[index] if isinstance(check, Sequence) else check
        where = f"data.{split}[{index}]"
        builder = _Builder(settings, name, where, split, renderer, kind, limits, config.on_bad_row, places, of_dataset)
        datasets.append(builder.build(plugins))
    return ExampleSet(tuple(datasets))


def _unique(name: str, taken: set[str]) -> str:
    number = 2
    candidate = name
    while candidate in taken:
        candidate, number = f"{name}-{number}", number + 1
    return candidate


@dataclass(slots=True, frozen=True)
class _Limits:
    prompt_tokens: int
    length: int


@dataclass(slots=True, frozen=True)
class _Builder:
    """Builds one dataset."""

    settings: DatasetSettings
    name: str
    where: str
    split: Split
    renderer: PromptRenderer
    kind: ExampleKind
    limits: _Limits
    on_bad_row: OnBadRow
    places: dict[str, str]
    """Example id -> place where it was read; shared by the datasets of a split."""
    check: ExampleCheck | None

    def build(self, plugins: PluginRegistry) -> Dataset:
        path = self.settings.path
        try:
            rows = list(islice(read_rows(path, self.settings.split, row_readers(plugins)), self.settings.limit))
        except DataError as error:
            raise DataError(f"{self.where}: {error}") from error
        if not rows:
            raise DataError(f"Data file '{path}' ({self.where}.path) is empty: it has no row.")
        format_name = self._format_name(rows, plugins)
        row_format = select_format(plugins, format_name, self.settings.options, self.where)
        examples: list[Example] = []
        bad_rows: list[str] = []
        lengths: list[int] = []
        num_filtered = 0
        control_rows: list[tuple[str, ...]] = []
        for number, located in enumerate(rows):
            try:
                example = self._example(located, number, row_format, control_rows)
            except TooLongError as error:
                lengths.append(error.at_least)
                num_filtered += 1
                continue
            except DataError as error:
                bad_rows.append(f"{located.place}: {error}")
                continue
            num_prompt = len(example.prompt.token_ids)
            lengths.append(num_prompt)
            if num_prompt > self.limits.prompt_tokens or example.num_tokens > self.limits.length:
                num_filtered += 1
            else:
                examples.append(example)
        if bad_rows and (self.on_bad_row == "error" or not lengths):
            raise bad_rows_error(bad_rows, path, len(rows))
        report = DatasetReport(
            self.name,
            path,
            format_name,
            num_rows=len(rows),
            num_examples=len(examples),
            num_filtered=num_filtered,
            max_prompt_tokens=self.limits.prompt_tokens,
            longest_prompt_tokens=max(lengths),
            bad_rows=tuple(bad_rows),
            control_tokens=Counter(token for tokens in control_rows for token in tokens),
            num_control_rows=len(control_rows),
            control_token_policy=self.renderer.control_tokens,
        )
        if not examples:
            raise DataError(self._all_filtered(report, min(lengths)))
        return Dataset(self.name, self.settings.weight, tuple(examples), report)

    def _format_name(self, rows: list[LocatedRow], plugins: PluginRegistry) -> str:
        if self.settings.format != "auto":
            return self.settings.format
        first = next((located for located in rows if located.row is not None), None)
        if first is None or first.row is None:
            raise bad_rows_error([f"{row.place}: {row.error}" for row in rows], self.settings.path, len(rows))
        try:
            return detect_format(plugins, first.row, self.where)
        except DataError as error:
            raise DataError(f"{first.place}: {error}") from error

    def _example(
        self, located: LocatedRow, number: int, row_format: DatasetFormat, control_rows: list[tuple[str, ...]]
    ) -> Example:
        """The example of a row; control tokens spelled out in it are added to ``control_rows``."""
        if located.row is None:
            raise DataError(located.error or "no row")
        raw = parse_row(row_format, located.row)
        prefix = "eval/" if self.split == "eval" else ""
        row = RowRenderer(
            self.renderer,
            row_format,
            self.where,
            id=raw.id if raw.id is not None else f"{prefix}{self.name}/{number}",
            data_source=raw.data_source or self.name,
        )
        try:
            example = self.kind.build(raw, row)
        finally:
            if row.spelled:
                control_rows.append(tuple(dict.fromkeys(row.spelled)))
        prompt = example.prompt
        if prompt.id in self.places:
            raise DataError(f"id '{prompt.id}' was already given to {self.places[prompt.id]}; ids must be unique")
        problem = self.check(prompt) if self.check is not None else None
        if problem is not None:
            raise DataError(problem)
        self.places[prompt.id] = located.place
        return example

    def _all_filtered(self, report: DatasetReport, shortest: int) -> str:
        return (
            f"No example of '{report.path}' ({self.where}) is short enough: {report.num_filtered} of {report.num_rows} "
            f"rows filtered out.\n  Prompts have {shortest} to {report.longest_prompt_tokens} tokens; at most "
            f"{self.limits.prompt_tokens} fit (data.max_prompt_tokens, and room for a completion in model.max_length "
            f"{self.limits.length}).\n  Raise those limits, or take shorter data."
        )
