"""The error of a configuration that breaks rules."""

from __future__ import annotations

from collections.abc import Sequence

from chatlearn_config.problems import Marks, Problem, in_order, render
from chatlearn_core.exceptions import ConfigError


class InvalidConfigError(ConfigError):
    """A configuration breaks rules; ``problems`` holds all problems, and the message describes each."""

    def __init__(self, source: str, problems: Sequence[Problem], marks: Marks) -> None:
        self.source = source
        self.problems = in_order(problems, marks)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{count} in {source}:", *(render(problem, marks) for problem in self.problems)]))
