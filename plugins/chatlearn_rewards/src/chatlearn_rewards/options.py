"""Options of each reward, as a configuration sets them."""

from __future__ import annotations

import os
import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

WORKERS_PER_CPU = 4
"""More workers would only wait for each other, and time out as they start."""


class RewardOptions(BaseModel):
    """Base of all options; unknown options are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PoolOptions(RewardOptions):
    """Options of every reward that runs in worker processes."""

    timeout_s: float = Field(
        10.0, gt=0, le=1e9, description="Longest time one sample may take; its worker is then killed."
    )
    num_workers: int | None = Field(
        None, ge=1, le=256, description="Number of worker processes; by default the number of CPUs, at most 4."
    )
    worker_memory_mb: int | None = Field(
        None, ge=256, le=1 << 30, description="Address space of one worker, MiB; no limit if null."
    )

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """Return warnings by option, about values that are allowed but probably mistakes."""
        cpus = os.cpu_count() or 1
        if self.num_workers is None or self.num_workers <= WORKERS_PER_CPU * cpus:
            return ()
        sentence = (
            f"{self.num_workers} processes share {cpus} CPUs: they start slowly, perhaps too slowly to answer"
            f" in time; {cpus} processes would judge as fast"
        )
        return (("num_workers", sentence),)


class RuleOptions(PoolOptions):
    """Options of rewards that compare a completion with a rule."""

    ungraded: Literal["wrong", "exclude"] = Field(
        "wrong",
        description="Treat a sample that cannot be judged within timeout_s and worker_memory_mb as wrong, so that a"
        " policy gains nothing by writing text that is too hard to judge; or exclude it.",
    )


class MathOptions(RuleOptions):
    """Options of ``math``."""

    correct: float = Field(1.0, description="Reward of a right answer.")
    incorrect: float = Field(0.0, description="Reward of a wrong answer, or none.")
    require_boxed: bool = Field(False, description="Only an answer in \\boxed{} counts.")
    strict: bool = Field(
        True,
        description="Refuse lists of guesses, chains of unequal equations, negations, other units and digits"
        " side by side, which math-verify accepts as equal; false grades as math-verify does.",
    )
    worker_memory_mb: int | None = Field(4096, ge=256, le=1 << 30, description="Address space of one worker, MiB.")


class Gsm8kOptions(RewardOptions):
    """Options of ``gsm8k``."""

    correct: float = Field(1.0, description="Reward of a right answer.")
    incorrect: float = Field(0.0, description="Reward of a wrong answer, or none.")
    strict: bool = Field(False, description="Only a number after #### counts; otherwise the last number does.")


class FormatOptions(RuleOptions):
    """Options of ``format``."""

    pattern: str = Field(description="Regular expression (Python's re) that a completion must match.")
    match: Literal["full", "search"] = Field(
        "full", description="Whether the expression must match the whole completion or a part of it."
    )
    flags: tuple[Literal["dotall", "ignorecase", "multiline", "verbose", "ascii"], ...] = Field(
        ("dotall",), description="Flags of re."
    )
    matched: float = Field(1.0, description="Reward of a match.")
    unmatched: float = Field(0.0, description="Reward otherwise.")
    timeout_s: float = Field(
        2.0, gt=0, le=1e9, description="Longest time one sample may take; its worker is then killed."
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
        return pattern


class FunctionOptions(PoolOptions):
    """Options of ``function``."""

    path: str = Field(description="package.module:function or path/to/file.py:function.")
    signature: Literal["auto", "compute_score", "lists"] = Field(
        "auto",
        description="compute_score(data_source, solution_str, ground_truth, extra_info), or lists: f(prompts, "
        "completions, **columns); auto decides by the names of the parameters.",
    )
    batch_size: int = Field(
        1,
        ge=1,
        description="lists only: number of samples per call; a crash or a timeout (timeout_s per sample) is an"
        " error of all of them. Which samples share a call depends on timing, so a sample's score should not depend"
        " on the rest of the list.",
    )
    conversational: bool = Field(False, description="lists only: pass chat messages instead of strings.")
    ungraded_score: float | None = Field(
        None,
        allow_inf_nan=False,
        description="Score of a sample that cannot be judged within timeout_s and worker_memory_mb; null excludes it. "
        "Only with batch_size 1.",
    )

    @field_validator("path")
    @classmethod
    def _names_a_function(cls, path: str) -> str:
        location, separator, name = path.rpartition(":")
        if not separator or not location or not name.isidentifier():
            raise ValueError(f"path {path!r} must be package.module:function or path/to/file.py:function")
        return path

    @model_validator(mode="after")
    def _knows_which_sample_is_ungraded(self) -> FunctionOptions:
        if self.ungraded_score is not None and self.batch_size > 1:
            raise ValueError(
                f"ungraded_score is {self.ungraded_score} and batch_size is {self.batch_size}: after a failed"
                " call it is unknown which sample caused it. Set batch_size to 1, or remove ungraded_score"
            )
        return self
