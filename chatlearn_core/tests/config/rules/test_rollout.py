"""Rules of the section ``rollout``: what each conflict says, and what is right at its limit."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

from chatlearn_core.config.invalid import InvalidConfigError
from chatlearn_core.config.load import load_config
from chatlearn_core.config.rules.rollout import ROLLOUT_RULES
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.records import AlgorithmSpec, GeneratorSpec, PluginRecord, RolloutModeSpec
from chatlearn_core.plugins.registry import PluginRegistry

OPTIONS_MODULE = "acme_options_of_config_tests"
RESUME = ["rollout.partial=resume", "rollout.round_tokens=100"]


class Correcting(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: int = 4
    importance_correction: Literal["none", "truncate", "mask"] = "none"
    recompute_old_logprobs: bool = True

    @property
    def stale_tokens(self) -> tuple[tuple[str, ...], str] | None:
        if self.importance_correction != "none" or not self.recompute_old_logprobs:
            return None
        return ("importance_correction", "recompute_old_logprobs"), "set one of the two"


@pytest.fixture
def plugins(registry: PluginRegistry, monkeypatch: pytest.MonkeyPatch) -> PluginRegistry:
    """Beside the usual ones an algorithm that corrects, and a generator that can everything."""
    monkeypatch.setattr(sys.modules[OPTIONS_MODULE], "Correcting", Correcting, raising=False)
    code = {"factory": "acme.code:Thing", "options": f"{OPTIONS_MODULE}:Empty"}
    roles = (("trainer", "trainer"), ("generator", "generator"), ("reward", "reward"))
    able = GeneratorSpec(name="able", resumable=True, kv_after_sync="kept", **code)
    correcting = AlgorithmSpec(
        name="correcting", roles=roles, factory="acme.code:Thing", options=f"{OPTIONS_MODULE}:Correcting"
    )
    ahead = RolloutModeSpec(name="ahead", max_staleness=1, plan="acme.code:plan", **code)
    return replace(registry, entries=(*registry.entries, *map(entry, (able, correcting, ahead))))


def entry(record: PluginRecord) -> PluginEntry:
    return PluginEntry(
        name=record.name, kind=record.kind, distribution="acme", version="0.3.0", status="ok", record=record
    )


CASES: dict[str, list[tuple[list[str], str]]] = {
    "stealing_has_queues": [
        (
            ["rollout.work_stealing=true"],
            "rollout.work_stealing: takes over what waits in front of a replica, but without max_concurrent every "
            "request starts at once (got True)",
        ),
    ],
    "partial_settings": [
        (["rollout.partial=resume"], "rollout.round_tokens: 'rollout.partial: resume' needs the number"),
        (
            ["rollout.partial=resume", "rollout.round_tokens=512"],
            "rollout.round_tokens: a round is as long as the longest completion, so no completion would be resumed"
            " (got 512)\n"
            "    sampling.max_tokens = 512 (default)",
        ),
        (["rollout.round_tokens=9"], "rollout.round_tokens: sets the length of a round, which only"),
        (
            [*RESUME, "rollout.max_staleness=2"],
            "rollout.max_staleness: a completion of 4 steps has tokens that are 3 policy versions old (got 2)\n"
            "    rollout.max_rounds = 4 (default)\n    raise it to 3, remove it, or lower rollout.max_rounds",
        ),
        (["rollout.in_flight_prompts=9"], "rollout.in_flight_prompts: applies to partial rollouts only"),
        (
            ["rollout.partial=keep", "rollout.in_flight_prompts=4"],
            "rollout.in_flight_prompts: a step of 'keep' ends when prompts_per_step prompts are complete",
        ),
        (
            ["rollout.partial=keep", "rollout.request_timeout_s=3.0"],
            "rollout.request_timeout_s: would also count the time during which 'keep' pauses a request",
        ),
    ],
    "partial_is_supported": [
        (
            [*RESUME, "roles.generator.backend=transformers"],
            "rollout.partial: generator 'transformers' does not resume completions",
        ),
        (
            ["rollout.partial=keep", "roles.generator.backend=transformers"],
            "rollout.partial: generator 'transformers' ends unfinished requests at a weight sync (kv_after_sync:"
            " dropped)",
        ),
    ],
    "mode_settings": [
        (
            ["rollout.options.during_sync=wait"],
            "rollout.options: mode 'sync' takes no options (got {'during_sync': 'wait'})\n"
            "    rollout.mode = 'sync' (default)\n    remove them, or set rollout.mode",
        ),
        (
            ["rollout.mode=ahead", *RESUME],
            "rollout.partial: partial rollouts belong to steps that wait for rollouts; this mode goes on with them by "
            "itself (got 'resume')\n    rollout.mode = 'ahead'",
        ),
    ],
    "stale_tokens_are_corrected": [
        (
            ["rollout.mode=ahead", "algorithm.name=correcting"],
            "rollout.mode: the run trains on tokens sampled by older weights, and this algorithm would treat them as "
            "on-policy (got 'ahead')",
        ),
        (
            [*RESUME, "algorithm.name=correcting"],
            "rollout.partial: the run trains on tokens sampled by older weights, and this algorithm would treat them "
            "as on-policy (got 'resume')\n    algorithm.options.importance_correction = 'none' (default)\n"
            "    algorithm.options.recompute_old_logprobs = True (default)\n"
            "    set one of the two",
        ),
        (
            ["rollout.max_staleness=1", "algorithm.name=correcting"],
            "rollout.max_staleness: the run trains on tokens sampled by older weights, and this algorithm would treat",
        ),
    ],
}


def test_every_rule_has_a_case() -> None:
    assert {rule.__name__ for rule in ROLLOUT_RULES} == set(CASES)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [pytest.param(*case, id=f"{rule}-{index}") for rule, cases in CASES.items() for index, case in enumerate(cases)],
)
def test_rule(overrides: list[str], expected: str, valid: str, plugins: PluginRegistry) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(valid, ["roles.generator.backend=able", *overrides], plugins)
    heading, _, message = str(caught.value).partition("\n")
    assert heading == "1 problem in <text>:"
    assert message.partition(": ")[2].startswith(expected)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.work_stealing=true", "rollout.max_concurrent=8"],
        [*RESUME, "rollout.request_timeout_s=3.0", "rollout.in_flight_prompts=1"],
        ["rollout.partial=resume", "rollout.round_tokens=511"],
        ["rollout.partial=keep", "rollout.in_flight_prompts=5"],
        ["rollout.partial=keep"],
        [*RESUME, "algorithm.name=correcting", "algorithm.options.importance_correction=mask"],
        [*RESUME, "algorithm.name=correcting", "algorithm.options.recompute_old_logprobs=false"],
        ["algorithm.name=correcting"],
        ["rollout.mode=sync"],
        ["rollout.mode=ahead", "rollout.max_staleness=0", "algorithm.name=correcting"],
        ["roles.generator.backend=transformers", "rollout.partial=none"],
        [*RESUME, "roles.judge={kind: generator, backend: transformers, model: {path: own}}"],
    ],
)
def test_at_the_limit_nothing_is_told(overrides: list[str], valid: str, plugins: PluginRegistry) -> None:
    load_config(valid, ["roles.generator.backend=able", *overrides], plugins)
