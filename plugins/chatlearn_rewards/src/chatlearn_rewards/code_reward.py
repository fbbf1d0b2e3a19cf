"""Reward ``code``: runs the completion's program against the row's tests, in a sandbox."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Sequence
from typing import Any

from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import RewardResult, Sample
from chatlearn_rewards.code_judging import VERDICTS, Verdict
from chatlearn_rewards.code_options import CodeOptions
from chatlearn_rewards.code_tests import RULE, TestFormatError, read_tests
from chatlearn_rewards.pooled_reward import PooledReward
from chatlearn_rewards.process_pool import Outcome, Task
from chatlearn_sandbox.sandbox import START_TIMEOUT_S

FENCE = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`]*)[^\n`]*$", re.MULTILINE)
PYTHON = frozenset({"", "python", "py", "python3"})


class CodeReward(PooledReward):
    """Rewards the fraction of tests passed, or only a full pass. A broken sandbox or test is an error, not a 0."""

    def __init__(self, options: CodeOptions, context: RoleContext) -> None:
        limits: dict[str, Any] = {
            "wall_s": options.timeout_s,
            "memory_bytes": options.memory_mb << 20,
            "max_processes": options.max_processes,
            "file_bytes": options.disk_mb << 20,
            "disk_bytes": options.disk_mb << 20,
            "output_bytes": options.output_kb << 10,
        }
        arguments: dict[str, Any] = {
            "limits": limits,
            "isolation": options.isolation,
            "packages": [os.path.realpath(sysconfig.get_paths()["purelib"])] if options.packages else [],
            "timeout_s": options.timeout_s,
            "total_timeout_s": options.total_timeout_s,
            "stop_at_failure": options.scoring == "all",
            "tolerance": options.tolerance,
        }
        super().__init__("code", Task("chatlearn_rewards.code_judging:build_code_judge", arguments), options, context)
        self._options = options
        self._role = context.role

    async def _score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Components: ``accuracy`` is 1 if every test passed, ``tests_passed`` the share of them, and each verdict but
        ``passed`` is 1 where it is the sample's: that of the first test that failed.
        """
        results: list[RewardResult] = []
        judged: list[int] = []
        payloads: list[dict[str, Any]] = []
        for index, sample in enumerate(samples):
            truth = sample.prompt.ground_truth
            problem = code_problem(self._options, truth)
            code = last_block(sample.text, unfenced=self._options.unfenced)
            if problem is not None:
                where = f"reward 'code' of role {self._role!r}: prompt {sample.prompt.id!r}"
                results.append(RewardResult(None, error=f"{where} {problem}"))
                continue
            results.append(self._graded(["no_code"], 1))
            if code is not None:
                judged.append(index)
                payloads.append({"code": code, "tests": truth})
        # Each test has its own limit; the pool's limit ends a worker that hangs outside the tests.
        limit_s = 2 * (self._options.total_timeout_s + self._options.timeout_s + START_TIMEOUT_S)
        outcomes = await self._pool.run(payloads, [limit_s] * len(payloads))
        for index, outcome in zip(judged, outcomes, strict=True):
            results[index] = self._result(outcome)
        return results

    def _result(self, outcome: Outcome) -> RewardResult:
        error = outcome.error if outcome.error is not None else outcome.value.get("error")
        if error is not None:
            return RewardResult(None, error=str(error))
        return self._graded(outcome.value["verdicts"], outcome.value["num_tests"])

    def _graded(self, verdicts: Sequence[Verdict], num_tests: int) -> RewardResult:
        share = sum(verdict == "passed" for verdict in verdicts) / num_tests
        first = next((verdict for verdict in verdicts if verdict != "passed"), "passed")
        credit = share if self._options.scoring == "share" else float(share == 1.0)
        components = {"accuracy": float(share == 1.0)}
        if self._options.scoring == "share":  # if only a full pass counts, the first failure decides
            components["tests_passed"] = share
        components |= {verdict: float(verdict == first) for verdict in VERDICTS if verdict != "passed"}
        return RewardResult(
            self._options.incorrect + (self._options.correct - self._options.incorrect) * credit, components
        )


def last_block(text: str, *, unfenced: str) -> str | None:
    """The code of the last closed Markdown block in Python or no stated language; None if there is none.

    Args:
        unfenced: ``whole`` takes a text without any fence as code.
    """
    last: str | None = None
    opening: re.Match[str] | None = None
    for found in FENCE.finditer(text):
        if opening is None:
            opening = found
        elif found["fence"].startswith(opening["fence"]) and not found["language"]:
            if opening["language"].lower() in PYTHON:
                last = text[opening.end() + 1 : found.start()]
            opening = None
    if last is None and opening is None and unfenced == "whole" and not FENCE.search(text):
        last = text
    return last if last is not None and last.strip() else None


def code_problem(options: CodeOptions, ground_truth: Any) -> str | None:
    """Return why no program can be judged by this ground truth, or None if one can."""
    try:
        read_tests(ground_truth)
    except TestFormatError as error:
        return f"has {error}; {RULE}"
    return None
