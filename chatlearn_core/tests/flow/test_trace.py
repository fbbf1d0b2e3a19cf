"""Tracing: what a good flow becomes, and what every bad one is told."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from chatlearn_core.exceptions import FlowError
from chatlearn_core.flow import trace

ROLES = {
    "generator": "generator",
    "judge": "generator",
    "reward": "reward",
    "rules": "reward",
    "reference": "trainer",
    "trainer": "trainer",
}


def grpo(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return m.join(samples, m.reward.score(samples), m.reference.logprobs(samples), m.trainer.logprobs(samples))


def test_nodes_inputs_and_fields() -> None:
    graph = trace(grpo, ROLES)
    assert graph.name == "grpo"
    assert [node.name for node in graph.nodes] == [
        "generator.generate",
        "reward.score",
        "reference.logprobs",
        "trainer.logprobs",
    ]
    assert [node.inputs for node in graph.nodes] == [(), (0,), (0,), (0,)]
    assert [node.field for node in graph.nodes] == ["completion", "reward", "reference_logprobs", "trainer_logprobs"]
    assert graph.roles == {"generator": "generator", "reward": "reward", "reference": "trainer", "trainer": "trainer"}


def test_levels_hold_what_may_run_at_the_same_time() -> None:
    levels = trace(grpo, ROLES).levels
    assert [[node.role for node in level] for level in levels] == [["generator"], ["reward", "reference", "trainer"]]


def test_calls_on_joined_samples_depend_on_all_of_them() -> None:
    def chained(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        scored = m.join(samples, m.reward.score(samples))
        return m.join(scored, m.trainer.logprobs(scored))

    graph = trace(chained, ROLES)
    assert graph.nodes[2].inputs == (0, 1)
    assert len(graph.levels) == 3


def test_source_lines_are_those_of_the_flow() -> None:
    first_line = inspect.getsourcelines(grpo)[1]
    graph = trace(grpo, ROLES)
    assert graph.nodes[0].source == f"{__file__}:{first_line + 1}"
    assert graph.nodes[1].source == f"{__file__}:{first_line + 2}"


def test_methods_of_objects_may_decide_on_their_settings() -> None:
    class Algorithm:
        kl = False

        def flow(self, prompts: Any, m: Any) -> Any:
            samples = m.generator.generate(prompts)
            return m.join(samples, m.reference.logprobs(samples)) if self.kl else samples

    algorithm = Algorithm()
    assert len(trace(algorithm.flow, ROLES).nodes) == 1
    algorithm.kl = True
    assert len(trace(algorithm.flow, ROLES).nodes) == 2


def test_demonstrations_have_completions_already() -> None:
    assert trace(lambda examples, m: examples, ROLES, input_kind="demonstrations").nodes == ()
    graph = trace(
        lambda examples, m: m.join(examples, m.reference.logprobs(examples)), ROLES, input_kind="demonstrations"
    )
    assert [node.name for node in graph.nodes] == ["reference.logprobs"]


def _branches(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return samples if samples else None


def _loops(prompts: Any, m: Any) -> Any:
    return [m.generator.generate(prompt) for prompt in prompts]


def _reads_a_field(prompts: Any, m: Any) -> Any:
    return m.generator.generate(prompts).completion


def _compares(prompts: Any, m: Any) -> Any:
    return m.generator.generate(prompts) == 1


def _unknown_role(prompts: Any, m: Any) -> Any:
    return m.genrator.generate(prompts)


def _unknown_method(prompts: Any, m: Any) -> Any:
    return m.generator.sample(prompts)


def _wrong_kind_of_method(prompts: Any, m: Any) -> Any:
    return m.reward.generate(prompts)


def _drops_a_result(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    m.reward.score(samples)
    return samples


def _calls_twice(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return m.join(samples, m.reward.score(samples), m.reward.score(samples))


def _scores_prompts(prompts: Any, m: Any) -> Any:
    return m.reward.score(prompts)


def _generates_from_samples(prompts: Any, m: Any) -> Any:
    return m.judge.generate(m.generator.generate(prompts))


def _mixes_samples(prompts: Any, m: Any) -> Any:
    return m.join(m.generator.generate(prompts), m.judge.generate(prompts))


def _scores_twice(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return m.join(samples, m.reward.score(samples), m.rules.score(samples))


def _joins_a_number(prompts: Any, m: Any) -> Any:
    return m.join(m.generator.generate(prompts), 1)


def _passes_a_string(prompts: Any, m: Any) -> Any:
    return m.generator.generate("prompts")


def _returns_nothing(prompts: Any, m: Any) -> Any:
    m.generator.generate(prompts)


def _returns_a_list(prompts: Any, m: Any) -> Any:
    return [m.generator.generate(prompts)]


@pytest.mark.parametrize(
    ("flow", "says"),
    [
        (_branches, "branches on samples"),
        (_loops, "loops over samples"),
        (_reads_a_field, "reads the attribute 'completion'"),
        (_compares, "compares samples"),
        (_unknown_role, "role 'genrator', which the configuration does not define.*Did you mean 'generator'"),
        (_unknown_method, "'generator' is a generator and has no method 'sample'; it has generate"),
        (_wrong_kind_of_method, "'reward' is a reward and has no method 'generate'; it has score"),
        (_drops_a_result, "the result of reward.score is not used"),
        (_calls_twice, "reward.score is called twice on the same samples"),
        (_scores_prompts, "reward.score takes samples.*call a generator role first"),
        (_generates_from_samples, "judge.generate takes the flow's prompts, but is given samples of another call"),
        (_mixes_samples, "m.join mixes samples of different calls: generator.generate.*judge.generate"),
        (_scores_twice, "rules.score would overwrite the reward that reward.score .* gave.*roles.reward.parts"),
        (_joins_a_number, "m.join takes samples and results of calls on roles, not int"),
        (_passes_a_string, "generator.generate takes prompts, not str 'prompts'"),
        (_returns_nothing, "the flow returns nothing"),
        (_returns_a_list, "the flow returns list"),
    ],
)
def test_a_bad_flow_is_refused_with_its_line(flow: Callable[..., Any], says: str) -> None:
    with pytest.raises(FlowError, match=says) as caught:
        trace(flow, ROLES)
    first, number_of_lines = inspect.getsourcelines(flow)[1], len(inspect.getsourcelines(flow)[0])
    lines = [f"{__file__}:{line}" for line in range(first, first + number_of_lines)]
    assert any(str(caught.value).startswith(line) for line in lines)


def test_a_reward_does_not_judge_demonstrations() -> None:
    """They have no completion, and would go unscored without a word."""
    with pytest.raises(FlowError, match=r"reward\.score judges completions that a generator sampled"):
        trace(lambda examples, m: m.join(examples, m.reward.score(examples)), ROLES, input_kind="demonstrations")


def test_a_role_whose_name_would_overwrite_the_sampled_logprobs_is_refused() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.sampler.generate(prompts)
        return m.join(samples, m.generator.logprobs(samples))

    with pytest.raises(FlowError, match=r"would overwrite 'generator_logprobs'.*rename the trainer role 'generator'"):
        trace(flow, {"sampler": "generator", "generator": "trainer"})
