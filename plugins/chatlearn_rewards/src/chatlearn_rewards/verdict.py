"""Reads the number out of a judge's answer."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median

from chatlearn_rewards.judge_options import DEFAULT_PATTERN, JudgeOptions


class VerdictReader:
    """Reads the number in an answer, by a pattern or by labels."""

    def __init__(self, options: JudgeOptions) -> None:
        self._options = options
        self._values = {label.strip().casefold(): value for label, value in options.labels.items()}
        # Longer labels first, so that "very good" is not read as "good".
        words = "|".join(re.escape(label) for label in sorted(self._values, key=len, reverse=True))
        by_label = rf"(?i)(?<!\w)({words})(?!\w)"
        self._pattern = re.compile(by_label if self._values else options.pattern or DEFAULT_PATTERN)

    def read(self, answer: str) -> float | None:
        """The last verdict in the answer; None if there is none, or one out of range."""
        found = self._pattern.findall(answer)
        if not found:
            return None
        if self._values:
            value = self._values[found[-1].casefold()]
        else:
            try:
                value = float(found[-1])
            except ValueError:
                return None
        lowest, highest = self._options.lowest, self._options.highest
        if not math.isfinite(value) or (lowest is not None and value < lowest):
            return None
        if highest is not None and value > highest:
            return None
        if self._options.normalise:
            assert lowest is not None, "checked with the options"
            assert highest is not None, "checked with the options"
            value = (value - lowest) / (highest - lowest)
        return value

    def combine(self, values: Sequence[float]) -> float:
        """Combine several votes to one value."""
        if self._options.combine == "mean":
            return fmean(values)
        if self._options.combine == "median":
            return median(values)
        counts = Counter(values)
        return min(value for value, count in counts.items() if count == max(counts.values()))
