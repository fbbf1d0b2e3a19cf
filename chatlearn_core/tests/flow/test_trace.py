"""Tracing: the graph of a valid flow, and the error for every invalid one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chatlearn_core.exceptions import FlowError
from chatlearn_core.flow import FlowVocabulary, trace
from chatlearn_core.plugins.records import FlowMethodSpec, OutputSpec

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
    assert [node.fields for node in graph.nodes] == [
        (),
        ("reward",),
        ("reference_logprobs",),
        ("trainer_logprobs",),
    ]
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
    assert trace(lambda examples, m: examples, ROLES, given="demonstrations").nodes == ()
    graph = trace(lambda examples, m: m.join(examples, m.reference.logprobs(examples)), ROLES, given="demonstrations")
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


def _uses_samples_as_a_bound(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    for _ in range(samples):
        samples = m.reward.score(samples)
    return samples


def _loops_without_end(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    temperature = 1.0
    while True:
        m.trainer.logprobs(samples, temperature=temperature, name=f"at_{temperature:.0f}")
        temperature += 1


def _misspells_an_argument(prompts: Any, m: Any) -> Any:
    return m.generator.generate(prompts, temprature=0)


def _passes_a_bad_value(prompts: Any, m: Any) -> Any:
    return m.generator.generate(prompts, top_p=2)


def _passes_samples_as_an_argument(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return m.trainer.logprobs(samples, temperature=samples)


def _passes_an_object(prompts: Any, m: Any) -> Any:
    return m.generator.generate(prompts, stop={"a"})


def _passes_two_values(prompts: Any, m: Any) -> Any:
    return m.generator.generate(prompts, 0.5)


def _forgets_an_argument(prompts: Any, m: Any) -> Any:
    return m.trainer.topk(m.generator.generate(prompts))


def _names_a_call_badly(prompts: Any, m: Any) -> Any:
    return m.trainer.logprobs(m.generator.generate(prompts), name="a name")


def _reads_what_is_not_there(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return m.join(samples, m.reference.topk(samples, k=4), m.trainer.logprobs_at(samples, ids="reference_topk_ids"))


def _overwrites_by_a_name(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    first = m.trainer.logprobs(samples, temperature=2.0)
    return m.join(samples, first, m.trainer.logprobs(m.join(samples, first)))


def _joins_groups_of_one_call(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return m.join_groups(samples, m.reward.score(samples))


def _joins_groups_of_the_input(prompts: Any, m: Any) -> Any:
    return m.join_groups(prompts, m.generator.generate(prompts))


def _applies_what_is_not_there(prompts: Any, m: Any) -> Any:
    return m.apply("json:no_such_function", m.generator.generate(prompts))


def _applies_no_import_string(prompts: Any, m: Any) -> Any:
    return m.apply("json.dumps", m.generator.generate(prompts))


def _applies_with_a_wrong_argument(prompts: Any, m: Any) -> Any:
    return m.apply("textwrap:indent", m.generator.generate(prompts), prefx="> ")


def _applies_what_cannot_be_called(prompts: Any, m: Any) -> Any:
    return m.apply("math:pi", m.generator.generate(prompts))


def _applies_by_token(prompts: Any, m: Any) -> Any:
    return m.apply("copy:copy", m.generator.generate(prompts), granularity="token")


def _applies_to_prompts(prompts: Any, m: Any) -> Any:
    return m.apply("copy:copy", prompts)


def _applies_beside_another_call(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return m.join(m.apply("copy:copy", samples), m.reference.logprobs(samples))


def _extends_twice(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return m.join(m.generator.extend(samples), m.generator.extend(samples, max_tokens=3))


def _extends_what_was_computed(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return m.generator.extend(m.join(samples, m.reference.logprobs(samples)))


async def _is_async(prompts: Any, m: Any) -> Any:
    return m.generator.generate(prompts)


@pytest.mark.parametrize(
    ("flow", "says"),
    [
        (_uses_samples_as_a_bound, "uses samples as a number"),
        (_loops_without_end, "more than 1000 calls: a loop in it has no end"),
        (_misspells_an_argument, "has no argument 'temprature'; it takes .*Did you mean 'temperature'"),
        (_passes_a_bad_value, r"generator.generate\(top_p=2\): Input should be less than or equal to 1"),
        (_passes_samples_as_an_argument, r"trainer.logprobs\(temperature=...\) is given samples"),
        (_passes_an_object, r"generator.generate\(stop=\{'a'\}\) is a set"),
        (_passes_two_values, "generator.generate takes prompts and named arguments, and is given 0.5"),
        (_forgets_an_argument, "trainer.topk needs the argument 'k'"),
        (_names_a_call_badly, r"trainer.logprobs\(name='a name'\): a name is letters"),
        (_reads_what_is_not_there, "logprobs_at reads ids='reference_topk_ids', which no earlier call adds.*have none"),
        (_overwrites_by_a_name, "trainer.logprobs would overwrite the trainer_logprobs that trainer.logprobs"),
        (_is_async, "the flow is an async function"),
        (_joins_groups_of_one_call, r"m.join_groups is given the samples of generator.generate .* twice; m.join puts"),
        (_joins_groups_of_the_input, "m.join_groups takes samples of generator calls, but is given the flow's input"),
        (_applies_what_is_not_there, r"m.apply\('json:no_such_function'\) cannot be imported: ImportError"),
        (_applies_no_import_string, "m.apply: 'json.dumps' is not an import string"),
        (
            _applies_with_a_wrong_argument,
            r"m.apply: textwrap:indent \(.*\) cannot be called with a list of samples and",
        ),
        (_applies_what_cannot_be_called, r"m.apply\('math:pi'\) is a float; it must be a function"),
        (_applies_by_token, r"m.apply\(granularity='token'\): one of sample, group, batch"),
        (_applies_to_prompts, "m.apply takes samples, but is given the flow's prompts"),
        (_applies_beside_another_call, "reference.logprobs works on samples that apply copy:copy .* works on, too"),
        (_extends_twice, "generator.extend works on samples that generator.extend .* works on, too"),
        (
            _extends_what_was_computed,
            "what reference.logprobs computes does not cover the tokens that generator.extend",
        ),
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


def test_calls_take_arguments_and_names() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts, temperature=0, max_tokens=8, stop=["."], top_k=None)
        teacher = m.join(samples, m.reference.topk(samples, k=4))
        return m.join(
            teacher,
            m.trainer.logprobs_at(teacher, ids="reference_topk_ids"),
            m.trainer.logprobs(samples),
            m.trainer.logprobs(samples, temperature=2.0, name="warm"),
            m.reward.score(samples),
            m.rules.score(samples, name="strict"),
        )

    graph = trace(flow, ROLES)
    assert graph.nodes[0].arguments == {"temperature": 0, "max_tokens": 8, "stop": ["."]}
    assert graph.nodes[0].call == 'generator.generate(temperature=0, max_tokens=8, stop=["."])'
    assert [node.fields for node in graph.nodes[1:]] == [
        ("reference_topk_ids", "reference_topk_logprobs"),
        ("trainer_logprobs_at",),
        ("trainer_logprobs",),
        ("warm_logprobs",),
        ("reward",),
        ("strict_reward",),
    ]


def test_a_loop_of_constant_length_unrolls() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        for temperature in (0.5, 1.0):
            samples = m.join(samples, m.trainer.logprobs(samples, temperature=temperature, name=f"t{temperature:.0f}"))
        return samples

    assert [node.fields for node in trace(flow, ROLES).nodes] == [(), ("t0_logprobs",), ("t1_logprobs",)]


def test_a_plugin_adds_a_method_and_its_output() -> None:
    known = FlowVocabulary.builtin()
    margin = FlowMethodSpec(
        name="trainer.margin",
        arguments="chatlearn_core.flow.arguments:ComputeArguments",
        outputs=("margin",),
        granularity="batch",
    )

    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        return m.join(samples, m.trainer.margin(samples, temperature=0.5))

    outputs = known.outputs | {"margin": OutputSpec(name="margin")}
    vocabulary = replace(known, methods=known.methods | {margin.name: margin}, outputs=outputs)
    assert trace(flow, ROLES, vocabulary=vocabulary).nodes[1].fields == ("trainer_margin",)
    with pytest.raises(FlowError, match="requests the output 'margin', which no installed plugin describes"):
        trace(flow, ROLES, vocabulary=replace(vocabulary, outputs=known.outputs))


def test_a_reward_does_not_judge_demonstrations() -> None:
    """They have no completion, and would go unscored without a word."""
    with pytest.raises(FlowError, match=r"reward\.score judges completions that a generator sampled"):
        trace(lambda examples, m: m.join(examples, m.reward.score(examples)), ROLES, given="demonstrations")


def test_a_role_whose_name_would_overwrite_the_sampled_logprobs_is_refused() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.sampler.generate(prompts)
        return m.join(samples, m.generator.logprobs(samples))

    with pytest.raises(FlowError, match=r"would overwrite 'generator_logprobs'.*rename the trainer role 'generator'"):
        trace(flow, {"sampler": "generator", "generator": "trainer"})


def test_stages_put_roles_that_learn_into_consumption() -> None:
    produced, consumed = trace(grpo, ROLES).stages({"trainer"})
    assert [node.role for node in produced] == ["generator", "reward", "reference"]
    assert [node.role for node in consumed] == ["trainer"]


def test_what_needs_a_role_that_learns_is_consumption_and_what_it_needs_is_not() -> None:
    def chained(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        known = m.join(samples, m.trainer.logprobs(samples))
        scored = m.join(known, m.reward.score(known))
        return m.join(scored, m.reference.logprobs(samples), m.reference.entropy(scored))

    produced, consumed = trace(chained, ROLES).stages({"trainer"})
    assert [node.name for node in produced] == ["generator.generate", "reference.logprobs"]
    assert [node.name for node in consumed] == ["trainer.logprobs", "reward.score", "reference.entropy"]


def test_tokens_of_all_turns_add_up() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts, max_tokens=10)
        short = m.judge.generate(prompts, max_tokens=3)
        for _ in range(2):
            samples = m.generator.extend(samples)
        return m.join_groups(samples, short)

    assert trace(flow, ROLES).sampled_tokens(4) == 18


def test_without_roles_that_learn_everything_is_production() -> None:
    graph = trace(grpo, ROLES)
    assert graph.stages(()) == (graph.nodes, ())
