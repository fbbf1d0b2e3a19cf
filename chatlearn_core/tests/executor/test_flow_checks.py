"""What is wrong between a configuration and its algorithm is said before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chatlearn_core.config.models import RunConfig
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.flow_checks import (
    called_by_text,
    check_partial_rollouts,
    check_roles,
    check_scores,
    check_stages,
    check_uses,
)
from chatlearn_core.flow import FlowVocabulary, Graph, trace
from chatlearn_core.plugins.records import FlowMethodSpec, GeneratorSpec, RewardSpec, RoleUse
from chatlearn_core.protocols import Loss
from chatlearn_core.types import OutputRequest


@dataclass(slots=True, frozen=True)
class LossNeeds:
    """What is looked at of a loss."""

    needs: OutputRequest


LOSSES = cast(dict[str, tuple[Loss, ...]], {"trainer": (LossNeeds(OutputRequest(frozenset({"logprobs", "entropy"}))),)})


def flow(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return m.join(samples, m.critic.values(samples))


def check(**of_roles: dict[str, Any]) -> None:
    roles: dict[str, dict[str, Any]] = {
        "trainer": {"kind": "trainer", "backend": "fsdp"},
        "critic": {"kind": "trainer", "backend": "fsdp", "head": "value"},
        "generator": {"kind": "generator", "backend": "transformers"},
    }
    for name, settings in of_roles.items():
        roles[name] = roles.get(name, {}) | settings
    config = RunConfig.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": [{"path": "train.jsonl"}]},
            "algorithm": {"name": "any"},
            "roles": roles,
            "train": {"steps": 1, "prompts_per_step": 1},
        }
    )
    check_roles(
        config,
        trace(flow, {name: role["kind"] for name, role in roles.items()}),
        LOSSES,
        FlowVocabulary.builtin().outputs,
    )


def partial(flow_function: Any, mode: str) -> None:
    roles = {"trainer": {"kind": "trainer", "backend": "fsdp"}}
    config = RunConfig.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": [{"path": "train.jsonl"}]},
            "algorithm": {"name": "any"},
            "roles": roles,
            "rollout": {"partial": mode},
            "train": {"steps": 1, "prompts_per_step": 1},
        }
    )
    kinds = {"trainer": "trainer", "generator": "generator", "critic": "trainer"}
    check_partial_rollouts(config, trace(flow_function, kinds))


def test_partial_rollouts_need_a_flow_that_generates() -> None:
    def never(prompts: Any, m: Any) -> Any:
        return prompts

    partial(flow, "resume")
    partial(never, "none")
    with pytest.raises(
        ConfigError, match=r"rollout\.partial is 'keep', .* algorithm 'any' generates nothing\. Set rollout"
    ):
        partial(never, "keep")


def test_partial_rollouts_are_of_one_call() -> None:
    def twice(prompts: Any, m: Any) -> Any:
        return m.generator.extend(m.generator.generate(prompts))

    partial(twice, "none")
    with pytest.raises(ConfigError, match=r"calls generators 2 times, the second time with generator\.extend"):
        partial(twice, "resume")


def test_nothing_is_generated_from_what_a_role_computes_that_learns() -> None:
    def selects(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        return m.generator.extend(m.apply("copy:copy", m.join(samples, m.trainer.logprobs(samples))))

    graph = trace(selects, {"trainer": "trainer", "generator": "generator"})
    config: Any = SimpleNamespace(algorithm=SimpleNamespace(name="any"))
    check_stages(config, graph, ())
    with pytest.raises(ConfigError, match=r"test_flow_checks.py:\d+: generator.extend needs what 'trainer' computes"):
        check_stages(config, graph, {"trainer"})


def test_roles_that_fit() -> None:
    check()


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        ({"trainer": {"trainable": False}}, r"roles\.trainer\.trainable is false, but algorithm 'any' trains"),
        ({"critic": {"trainable": True}}, r"roles\.critic\.trainable is true, but algorithm 'any' has no loss for it"),
        (
            {"judge": {"kind": "reward", "backend": "math"}},
            r"roles\.judge is defined, but the flow.*Remove the role.*several rewards are the parts of one role",
        ),
        ({"spare": {"kind": "generator", "backend": "transformers"}}, r"roles\.spare is defined, but the flow"),
        ({"trainer": {"head": "value"}}, r"roles\.trainer\.head is 'value', but the output 'entropy'.*Set it to lm"),
        (
            {"critic": {"head": "lm"}},
            r"roles\.critic\.head is 'lm', but critic\.values of the flow \(.*Set it to value",
        ),
        ({"reference": {"kind": "trainer", "backend": "fsdp"}}, r"roles\.reference is defined, but the flow"),
    ],
)
def test_roles_that_do_not_fit_are_named_with_what_to_do(roles: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(**roles)


def test_a_generator_that_does_not_score_given_tokens_is_refused() -> None:
    record = GeneratorSpec(name="acme", factory="a:b", options="a:c", channels=frozenset(), kv_after_sync="recomputed")
    loaded: Any = SimpleNamespace(plugin=lambda *path: SimpleNamespace(record=record))
    graph = trace(lambda prompts, m: m.generator.score(m.generator.generate(prompts)), {"generator": "generator"})
    with pytest.raises(ConfigError, match=r"generator\.score .*generator 'acme' \(role 'generator'\) does not give"):
        check_scores(loaded, graph)
    record = replace(record, scores=True)
    check_scores(loaded, graph)


def test_a_reward_model_takes_a_generator_that_classifies_or_scores() -> None:
    plain = GeneratorSpec(name="acme", factory="a:b", options="a:c", channels=frozenset(), kv_after_sync="recomputed")
    use = RoleUse(scores=True, classifies=True)
    reward = RewardSpec(name="rm", factory="a:b", options="a:c", uses={"model": use})
    roles = {"reward": SimpleNamespace(kind="reward", uses={"model": "scorer"}, parts=())}

    def checked(generator: GeneratorSpec, reward: RewardSpec = reward, **options: Any) -> None:
        choices = {
            "reward": SimpleNamespace(record=reward, options=SimpleNamespace()),
            "scorer": SimpleNamespace(record=generator, options=SimpleNamespace(**options)),
        }
        loaded: Any = SimpleNamespace(config=SimpleNamespace(roles=roles), plugin=lambda *path: choices[path[1]])
        check_uses(loaded, cast("Any", None), ["reward"])  # the registry is for trainers

    checked(replace(plain, scores=True))
    checked(replace(plain, classifies=True))
    checked(plain, classifies=True)
    with pytest.raises(
        ConfigError,
        match=r"roles\.reward\.uses\.model is .scorer.: this reward asks it for logprobs of given tokens, which "
        r"generator .acme. does not give, or for the score of a sequence classifier, which it does not serve",
    ):
        checked(replace(plain, classifies=True), classifies=False)
    only_scores = replace(reward, uses={"model": replace(use, classifies=False)})
    with pytest.raises(ConfigError, match=r"generator 'acme' serves a sequence classifier, which does neither"):
        checked(replace(plain, scores=True), only_scores, classifies=True)


def test_a_role_that_is_given_text_alone_may_have_its_own_tokenizer() -> None:
    arguments = "chatlearn_core.flow.arguments:NoArguments"
    by_text = FlowMethodSpec(name="trainer.read", arguments=arguments, adds=("{name}_read",), by_text=True)
    known = FlowVocabulary.builtin()
    known = replace(known, methods={**known.methods, by_text.name: by_text})
    kinds = {"generator": "generator", "teacher": "trainer", "policy": "trainer"}
    roles = {name: SimpleNamespace(kind=kind) for name, kind in kinds.items()}
    loaded: Any = SimpleNamespace(config=SimpleNamespace(roles=roles))

    def graph(flow: Any) -> Graph:
        return trace(flow, kinds, vocabulary=known)

    def reads(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        return m.join(samples, m.teacher.read(samples), m.policy.logprobs(samples))

    def also_computes(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        return m.join(samples, m.teacher.read(samples), m.teacher.logprobs(samples))

    assert called_by_text(loaded, [graph(reads)], ["policy"]) == {"teacher"}
    assert called_by_text(loaded, [graph(reads), graph(also_computes)], ["policy"]) == set()
    assert called_by_text(loaded, [graph(reads)], ["policy", "teacher"]) == set()
