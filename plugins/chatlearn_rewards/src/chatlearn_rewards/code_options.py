"""Options of reward ``code``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from chatlearn_rewards.options import PoolOptions


class CodeOptions(PoolOptions):
    """Options of ``code``."""

    correct: float = Field(1.0, allow_inf_nan=False, description="Reward of a program that passes every test.")
    incorrect: float = Field(0.0, allow_inf_nan=False, description="Reward of one that passes none, or of no program.")
    scoring: Literal["all", "share"] = Field(
        "all", description="All tests or nothing; or the share of tests passed, between incorrect and correct."
    )
    unfenced: Literal["none", "whole"] = Field(
        "none", description="Whether a completion without a fenced block is no program, or a program as a whole."
    )
    isolation: Literal["namespaces", "none"] = Field(
        "namespaces",
        description="namespaces: no network, no files but its own, no other processes; refused where the kernel "
        "allows none. none: limits on time, memory and output alone, for code that is trusted.",
    )
    packages: bool = Field(False, description="Whether programs can import the packages of the run's environment.")
    timeout_s: float = Field(10.0, gt=0, le=3600, description="Longest time of one test, seconds.")
    total_timeout_s: float = Field(
        60.0, gt=0, le=86400, description="Longest time of all tests of one sample; what is left has timed out."
    )
    memory_mb: int = Field(512, ge=32, le=1 << 20, description="Address space of each process of a program, MiB.")
    max_processes: int = Field(16, ge=1, le=4096, description="Processes and threads of a program at a time.")
    disk_mb: int = Field(32, ge=1, le=1 << 20, description="Files that a program may write, MiB; they are in memory.")
    output_kb: int = Field(1024, ge=1, le=1 << 16, description="Standard output of a program, KiB; more is a failure.")
    tolerance: float = Field(
        0.0, ge=0, le=1, description="Of numbers on standard output, absolute or relative; 0 compares text."
    )

    @model_validator(mode="after")
    def _has_time_for_a_test(self) -> CodeOptions:
        if self.total_timeout_s < self.timeout_s:
            raise ValueError(
                f"total_timeout_s is {self.total_timeout_s:g} and timeout_s, of one test, is {self.timeout_s:g}: raise "
                "total_timeout_s, or lower timeout_s"
            )
        return self
