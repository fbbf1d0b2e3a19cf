"""Options of each reward, as a configuration sets them."""

from __future__ import annotations

import os
import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

WORKERS_PER_CPU = 4
"""More only take turns, and time out as they start."""


class RewardOptions(BaseModel):
    """Unknown options are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PoolOptions(RewardOptions):
    """Of every reward that runs in worker processes."""

    timeout_s: float = Field(
        10.0, gt=0, le=1e9, description="Longest time one sample may take; its worker is then killed."
    )
    num_workers: int | None = Field(
        None, ge=1, le=256, description="Worker processes; as many as CPUs, at most 4, by default."
    )
    worker_memory_mb: int | None = Field(
        None, ge=256, le=1 << 30, description="Address space of one worker, MiB; no limit if null."
    )

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """What is allowed and hardly meant, by option."""
        cpus = os.cpu_count() or 1
        if self.num_workers is None or self.num_workers <= WORKERS_PER_CPU * cpus:
            return ()
        sentence = (
            f"{self.num_workers} processes share {cpus} CPUs: they start slowly, perhaps too slowly for any to answer "
            "in time; as many as CPUs judge as fast"
        )
        return (("num_workers", sentence),)


class RuleOptions(PoolOptions):
    """Of rewards that compare a completion with a rule."""

    ungraded: Literal["wrong", "exclude"] = Field(
        "wrong",
        description="A sample that cannot be judged within timeout_s and worker_memory_mb is wrong, so that a policy "
        "is not spared for text that is too hard to judge; or it is excluded.",
    )


class MathOptions(RuleOptions):
    """Options of ``math``."""

    correct: float = Field(1.0, description="Reward of a right answer.")
    incorrect: float = Field(0.0, description="Reward of a wrong answer, or none.")
    require_boxed: bool = Field(False, description="Only an answer in \\boxed{} counts.")
    strict: bool = Field(
        True,
        description="Refuse lists of guesses, chains of unequal equations, negations, other units and digits side by "
        "side, which math-verify takes for equal; false grades as math-verify does.",
    )
    worker_memory_mb: int | None = Field(4096, ge=256, le=1 << 30, description="Address space of one worker, MiB.")


class Gsm8kOptions(RewardOptions):
    """Options of ``gsm8k``."""

    correct: float = Field(1.0, description="Reward of a right answer.")
    incorrect: float = Field(0.0, description="Reward of a wrong answer, or none.")
    strict: bool = Field(False, description="Only a number after #### counts; otherwise the last number does.")


class FormatOptions(RuleOptions):
    """Options of ``format``."""

    pattern: str = Field(description="Regular expression (Python's re) that a completion is to match.")
    match: Literal["full", "search"] = Field("full", description="The whole completion, or anywhere in it.")
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
        "completions, **columns); auto goes by the names of the parameters.",
    )
    batch_size: int = Field(
        1,
        ge=1,
        description="lists only: samples a call; a crash or a timeout (timeout_s a sample) marks them all. Which "
        "samples share a call is a matter of timing, so a sample's result should not depend on what else is in "
        "the list.",
    )
    conversational: bool = Field(False, description="lists only: chat messages instead of strings.")
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
                f"ungraded_score is {self.ungraded_score} and batch_size is {self.batch_size}: which sample of a call "
                "could not be judged is not known. Set batch_size to 1, or leave ungraded_score out"
            )
        return self
