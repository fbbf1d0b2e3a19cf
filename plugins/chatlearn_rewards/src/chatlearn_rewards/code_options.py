"""Options of reward ``code``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from chatlearn_rewards.options import PoolOptions


class CodeOptions(PoolOptions):
    """Options of ``code``."""

    correct: float = Field(1.0, allow_inf_nan=False, description="Reward of a program that passes every test.")
    incorrect: float = Field(
        0.0,
        allow_inf_nan=False,
        description="Reward of a program that passes no test, or of a completion without a program.",
    )
    scoring: Literal["all", "share"] = Field(
        "all",
        description="all: correct if every test passes, otherwise incorrect. share: between the two, by the fraction of"
        " tests passed.",
    )
    unfenced: Literal["none", "whole"] = Field(
        "none",
        description="How to read a completion without a fenced block: as no program, or as a program in its entirety.",
    )
    isolation: Literal["namespaces", "none"] = Field(
        "namespaces",
        description="namespaces: no network, and only the program's own files and processes; an error where the"
        " kernel forbids namespaces. none: only limits on time, memory and output, for trusted code.",
    )
    packages: bool = Field(False, description="Whether programs can import the packages of the run's environment.")
    timeout_s: float = Field(10.0, gt=0, le=3600, description="Time limit of one test in seconds.")
    total_timeout_s: float = Field(
        60.0,
        gt=0,
        le=86400,
        description="Time limit in seconds of all tests of a sample together; the remaining tests count as timed out.",
    )
    memory_mb: int = Field(
        512,
        ge=32,
        le=1 << 20,
        description="Address space of each process of a program, and memory of all, MiB.",
    )
    max_processes: int = Field(
        16, ge=1, le=4096, description="Largest number of processes and threads that a program may have at once."
    )
    disk_mb: int = Field(
        32,
        ge=1,
        le=1 << 20,
        description="Largest total size in MiB of files that a program may write; they stay in memory.",
    )
    output_kb: int = Field(
        1024,
        ge=1,
        le=1 << 16,
        description="Largest standard output of a program in KiB; a program that writes more fails.",
    )
    tolerance: float = Field(
        0.0, ge=0, le=1, description="Absolute or relative tolerance of numbers on standard output; 0 compares text."
    )

    @model_validator(mode="after")
    def _has_time_for_a_test(self) -> CodeOptions:
        if self.total_timeout_s < self.timeout_s:
            raise ValueError(
                f"total_timeout_s is {self.total_timeout_s:g} and timeout_s, of one test, is {self.timeout_s:g}: raise "
                "total_timeout_s, or lower timeout_s"
            )
        return self
