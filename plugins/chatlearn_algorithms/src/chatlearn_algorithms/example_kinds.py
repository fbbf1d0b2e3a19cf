"""Kinds of examples that contain completions: demonstrations to imitate, and ranked or labelled completions."""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from chatlearn_core.data.example_kind import RowRenderer
from chatlearn_core.data.format import RawExample
from chatlearn_core.exceptions import DataError
from chatlearn_core.types import Answer, Demonstration, ExampleDraw, Preference, Sample, sample_from_tokens


class Demonstrations:
    """Completions to imitate: one sample per draw."""

    def build(self, raw: RawExample, row: RowRenderer) -> Demonstration:
        """The prompt and its completion."""
        if raw.completion is None:
            raise DataError(f"no completion to imitate (looked in: {', '.join(row.format.completion_columns)})")
        shown = row.rendered(raw, raw.completion)
        mask = None if shown.loss_mask.all() else shown.loss_mask
        return Demonstration(row.prompt(raw, shown.prompt), shown.completion_ids, mask)

    def samples(self, draw: ExampleDraw) -> list[Sample]:
        """The demonstration."""
        example = cast(Demonstration, draw.example)
        return [sample_from_tokens(draw, 0, example.completion_ids, example.loss_mask)]


class Preferences:
    """Completions of one prompt, ranked or labelled: one sample each, all in one unit.

    ``sequence_data["rank"]`` is larger for a better completion; ``sequence_data["label"]`` is 1 for a good one and 0
    for a bad one. A sample has the one that its example has.
    """

    def build(self, raw: RawExample, row: RowRenderer) -> Preference:
        """The prompt and its completions."""
        if not raw.completions:
            raise DataError(f"no completions to compare (looked in: {', '.join(row.format.completion_columns)})")
        _check_verdicts(raw)
        shown = [row.rendered(raw, completion) for completion in raw.completions]
        if any(not np.array_equal(one.prompt.token_ids, shown[0].prompt.token_ids) for one in shown):
            raise DataError("the chat template writes the prompt differently for each of the completions")
        answers = tuple(Answer(one.completion_ids, None if one.loss_mask.all() else one.loss_mask) for one in shown)
        _check_sides(answers, raw)
        return Preference(
            row.prompt(raw, shown[0].prompt),
            answers,
            ranks=tuple(map(float, raw.ranks)),
            labels=tuple(raw.labels),
        )

    def samples(self, draw: ExampleDraw) -> list[Sample]:
        """One sample per completion, in order."""
        example = cast(Preference, draw.example)
        made: list[Sample] = []
        for index, answer in enumerate(example.completions):
            sample = sample_from_tokens(draw, index, answer.token_ids, answer.loss_mask)
            sample.unit_id = draw.group_id
            if example.ranks:
                sample.sequence_data["rank"] = example.ranks[index]
            else:
                sample.sequence_data["label"] = float(example.labels[index])
            made.append(sample)
        return made


def _check_verdicts(raw: RawExample) -> None:
    """Check that each completion has a rank, or each has a label."""
    count = len(raw.completions)
    if bool(raw.ranks) == bool(raw.labels):
        raise DataError(
            f"{count} completions with {len(raw.ranks)} ranks and {len(raw.labels)} labels; give one of the two, for"
            " every completion"
        )
    name, verdicts = ("ranks", raw.ranks) if raw.ranks else ("labels", raw.labels)
    if len(verdicts) != count:
        raise DataError(f"{count} completions with {len(verdicts)} {name}; each needs one")
    if raw.labels and not all(isinstance(label, bool) for label in raw.labels):
        raise DataError(f"labels must be true or false, not {list(raw.labels)!r:.60}")
    if not all(isinstance(rank, int | float) and math.isfinite(rank) for rank in raw.ranks):
        raise DataError(f"ranks must be finite numbers, not {list(raw.ranks)!r:.60}")
    if raw.ranks and len(set(raw.ranks)) == 1:
        raise DataError(
            "no preference: a single completion needs a label, not a rank"
            if count == 1
            else f"no preference: all {count} completions have rank {raw.ranks[0]:g}"
        )


def _check_sides(answers: tuple[Answer, ...], raw: RawExample) -> None:
    """Check that equal completions have equal ranks: a text cannot be better than itself."""
    verdicts = [*raw.ranks] or [*raw.labels]
    seen: dict[bytes, tuple[int, float]] = {}
    for index, (answer, verdict) in enumerate(zip(answers, verdicts, strict=True)):
        first, other = seen.setdefault(answer.token_ids.tobytes(), (index, verdict))
        if verdict != other:
            raise DataError(
                f"completions {first} and {index} are equal, but their ranks differ; remove the row"
                " or one of the completions"
            )
