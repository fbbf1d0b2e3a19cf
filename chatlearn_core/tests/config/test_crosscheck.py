"""Every rule with its whole message; the configuration is valid but for what the overrides say."""

import pytest

from chatlearn_core.config.crosscheck import RULES
from chatlearn_core.config.invalid import InvalidConfigError
from chatlearn_core.config.load import load_config
from chatlearn_core.config.rules.paths import PATH_RULES
from chatlearn_core.config.rules.rollout import ROLLOUT_RULES
from chatlearn_core.config.rules.sizes import SIZE_RULES
from chatlearn_core.plugins.registry import PluginRegistry

# rule name -> (overrides, whole message without heading and without "override ...: " marks)
CASES: dict[str, list[tuple[list[str], str]]] = {
    "nothing_is_empty": [
        (["model.path=' '"], "model.path: must not be empty (got ' ')"),
        (["data.train.0.path=''"], "data.train.0.path: must not be empty (got '')"),
        (["name=''", "output_dir=x"], "name: must not be empty (got '')"),
        (["roles.trainer.model={path: ''}"], "roles.trainer.model.path: must not be empty (got '')"),
        (["log.loggers=[{name: ''}]"], "log.loggers.0.name: must not be empty (got '')"),
    ],
    "role_names": [
        (
            ["roles.my-critic={kind: trainer, backend: fsdp}"],
            "roles.my-critic: a role's name must be an identifier that starts with a letter: "
            "a flow calls it as m.<name> (got 'my-critic')\n    rename the role",
        ),
        (
            ["roles._x={kind: trainer, backend: fsdp}"],
            "roles._x: a role's name must be an identifier that starts with a letter: "
            "a flow calls it as m.<name> (got '_x')\n    rename the role",
        ),
    ],
    "gates_are_parts": [
        (
            ["~roles.reward.backend", "roles.reward.parts=[{backend: math, gate: {part: 0, at_least: 1}}]"],
            "roles.reward.parts.0.gate.part: a gate is another part of the same role, by its place from 0; "
            "0 is this part itself (got 0)\n    name another part, or remove gate",
        ),
        (
            ["~roles.reward.backend", "roles.reward.parts=[{backend: math, gate: {part: 1, at_least: 1}}]"],
            "roles.reward.parts.0.gate.part: a gate is another part of the same role, by its place from 0; "
            "1 is no part: there are 1 (got 1)\n    name another part, or remove gate",
        ),
        (
            [
                "~roles.reward.backend",
                "roles.reward.parts=[{backend: math}, {backend: math, data_sources: [a]}]",
                "roles.reward.parts.0.gate={part: 1, at_least: 1}",
            ],
            "roles.reward.parts.0.gate.part: a gate must judge every sample that its part judges, and it judges fewer "
            "data sources (got 1)\n    roles.reward.parts.1.data_sources = ['a'] (MARK)\n"
            "    let the gate also judge these data sources",
        ),
    ],
    "backend_given": [
        (
            ["~roles.trainer.backend"],
            "roles.trainer.backend: a trainer role needs a backend\n"
            "    name an installed trainer (chatlearn plugins list)",
        ),
        (
            ["roles.generator.backend=''"],
            "roles.generator.backend: a generator role needs a backend\n"
            "    name an installed generator (chatlearn plugins list)",
        ),
        (
            ["~roles.reward.backend"],
            "roles.reward.backend: a reward role needs a backend, or parts to combine\n"
            "    name a reward (backend: math)",
        ),
        (
            ["roles.reward.parts=[{backend: math}, {backend: format}]"],
            "roles.reward.backend: a reward role has either a backend or parts, not both (got 'math')\n"
            "    roles.reward.parts = ['math', 'format'] (MARK)\n"
            "    move the backend into parts, or remove parts",
        ),
        (
            ["roles.trainer.parts=[{backend: math}]"],
            "roles.trainer.parts: only reward roles combine parts; this role is a trainer\n    remove parts",
        ),
    ],
    "keys_of_other_kinds": [
        (
            ["roles.generator.head=value"],
            "roles.generator.head: a generator role does not take head: the head belongs to a trainer's model "
            "(got 'value')\n    roles.generator.kind = 'generator' (<text>:13)\n"
            "    remove it; a value or reward head is a role of kind trainer",
        ),
        (
            ["roles.reward.head=reward"],
            "roles.reward.head: a reward role does not take head: the head belongs to a trainer's model "
            "(got 'reward')\n    roles.reward.kind = 'reward' (<text>:16)\n"
            "    remove it; a value or reward head is a role of kind trainer",
        ),
        (
            ["roles.generator.max_turns=4"],
            "roles.generator.max_turns: a generator role does not take max_turns: only an environment makes rollouts "
            "of several turns (got 4)\n    roles.generator.kind = 'generator' (<text>:13)\n"
            "    remove it, or set it for the environment",
        ),
        (
            ["roles.generator.trainable=true"],
            "roles.generator.trainable: a generator role does not take trainable: only a trainer learns (got True)\n"
            "    roles.generator.kind = 'generator' (<text>:13)\n    remove it",
        ),
        (
            ["roles.trainer.replicas=2"],
            "roles.trainer.replicas: a trainer role does not take replicas: a trainer is one model: "
            "copies of it would not learn together (got 2)\n    roles.trainer.kind = 'trainer' (<text>:10)\n"
            "    use ranks to spread a trainer over devices",
        ),
        (
            ["roles.reward.ranks=2"],
            "roles.reward.ranks: a reward role does not take ranks: it runs in one rank (got 2)\n"
            "    roles.reward.kind = 'reward' (<text>:16)\n"
            "    remove it; for more reward workers use replicas, on a runtime that hosts several",
        ),
        (
            ["roles.reward.device=cuda"],
            "roles.reward.device: a reward role does not take device: it is not placed on one (got 'cuda')\n"
            "    roles.reward.kind = 'reward' (<text>:16)\n"
            "    remove it; a reward model is a role of kind trainer with head: reward",
        ),
        (
            ["roles.reward.engine={a: 1}"],
            "roles.reward.engine: a reward role does not take engine: only trainers and generators have engines "
            "(got {'a': 1})\n"
            "    roles.reward.kind = 'reward' (<text>:16)\n"
            "    remove it, or set what the reward itself takes under options",
        ),
        (
            ["~roles.reward.backend", "roles.reward.parts=[{backend: math}]", "roles.reward.options={a: 1}"],
            "roles.reward.options: options is for the one backend of a role, and this role combines parts "
            "(got {'a': 1})\n"
            "    set the options of each part instead (parts.0.options)",
        ),
    ],
    "reward_replicas_are_hosted": [
        (
            ["roles.reward.replicas=2"],
            "roles.reward.replicas: the runtime 'local' keeps one copy of a role of kind reward (got 2)\n"
            "    runtime.backend = 'local' (default)\n"
            "    remove replicas, or choose a runtime that hosts several (chatlearn plugins list)",
        ),
    ],
    "heads_and_ranks": [
        (
            ["roles.trainer.head=reward"],
            "roles.trainer.head: trainer 'fsdp' has no reward head; it has: lm, value (got 'reward')\n"
            "    roles.trainer.backend = 'fsdp' (<text>:11)\n    choose one of these or another trainer",
        ),
        (
            ["roles.trainer.ranks=3", "runtime.backend=cluster"],
            "roles.trainer.ranks: trainer 'fsdp' runs in at most 2 rank(s) (got 3)\n"
            "    roles.trainer.backend = 'fsdp' (<text>:11)\n    set ranks to 2, or choose another trainer",
        ),
    ],
    "compared_logprobs_have_one_basis": [
        (
            ["sampling.temperature=0.7", "algorithm.name=ratios", "roles.generator.backend=raw"],
            "sampling.temperature: the algorithm compares the generator's logprobs with the trainer's, which are those "
            "at the temperature, of which 'raw' returns none: its logprobs are of the raw distribution (got 0.7)\n"
            "    algorithm.name = 'ratios' (MARK)\n"
            "    roles.generator.backend = 'raw' (MARK)\n"
            "    set the generator's option for processed logprobs, if it has one, or sample at temperature 1",
        ),
        (
            ["sampling.top_k=5", "algorithm.name=ratios"],
            "sampling.top_k: the algorithm compares the generator's logprobs with the trainer's, which are those at "
            "the temperature, of all tokens; what is left of them by top_k is another distribution (got 5)\n"
            "    algorithm.name = 'ratios' (MARK)\n"
            "    set it to 0",
        ),
    ],
    "engine_arguments": [
        (
            ["roles.trainer.backend=careless", "roles.trainer.engine={a: 1}"],
            "roles.trainer.engine: trainer 'careless' takes no engine arguments (its record has no check_engine) "
            "(got {'a': 1})\n    roles.trainer.backend = 'careless' (MARK)\n    remove them",
        ),
        (
            ["roles.generator.engine={revision: main, revison: 5}"],
            "roles.generator.engine.revison: generator 'transformers' does not take this engine argument: unknown; did"
            " you mean 'revision'? (got 5)\n    roles.generator.backend = 'transformers' (<text>:14)",
        ),
        (
            ["roles.generator.engine={'': 1}"],
            "roles.generator.engine: generator 'transformers' cannot check its engine arguments: ZeroDivisionError:"
            " division by zero (got {'': 1})\n    roles.generator.backend = 'transformers' (<text>:14)\n"
            "    report it to the authors of 'transformers'",
        ),
    ],
    "one_process_hosts_one_rank": [
        (
            ["roles.generator.ranks=2"],
            "roles.generator.ranks: the runtime 'local' hosts one rank per role, in this process (got 2)\n"
            "    runtime.backend = 'local' (default)\n"
            "    set ranks to 1, or choose a distributed runtime (chatlearn plugins list)",
        ),
    ],
    "refreshed_roles": [
        (
            ["roles.anchor={kind: trainer, backend: fsdp, refresh: {role: generator, every: 2}}"],
            "roles.anchor.refresh.role: a role takes weights from another trainer role (got 'generator')\n"
            "    name one of: trainer",
        ),
    ],
    "handles_are_roles": [
        (
            ["roles.game={kind: environment, backend: game, uses: {policy: trainer}}"],
            "roles.game.uses.policy: environment 'game' calls it by the handle 'policy', so it must be a generator; it "
            "is a trainer (got 'trainer')\n"
            "    name a role of kind generator",
        ),
        (
            ["roles.game={kind: environment, backend: game, uses: {other: generator}}"],
            "roles.game.uses: environment 'game' needs roles of kind generator for the handles policy"
            " (got {'other': 'generator'})\n"
            "    assign a role to each handle, such as uses: {policy: generator}",
        ),
        (
            ["roles.game={kind: environment, backend: game, uses: {policy: generator, judge: generator}}"],
            "roles.game.uses: environment 'game' needs roles of kind generator for the handles policy"
            " (got {'policy': 'generator', 'judge': 'generator'})\n"
            "    assign a role to each handle, such as uses: {policy: generator}",
        ),
        (
            ["roles.agent={kind: environment, backend: agent, uses: {judge: generator}}"],
            "roles.agent.uses: environment 'agent' needs roles of kind generator for the handles policy, judge"
            " (got {'judge': 'generator'})\n"
            "    assign a role to each handle, such as uses: {policy: generator}",
        ),
        (
            ["roles.agent={kind: environment, backend: agent, uses: {policy: generator, judge: trainer}}"],
            "roles.agent.uses.judge: environment 'agent' calls it by the handle 'judge', so it must be a generator; it "
            "is a trainer (got 'trainer')\n"
            "    name a role of kind generator",
        ),
        (
            ["roles.reward={kind: reward, backend: judged, uses: {judge: trainer}}"],
            "roles.reward.uses.judge: reward 'judged' calls it by the handle 'judge', so it must be a generator; it is "
            "a trainer (got 'trainer')\n"
            "    name a role of kind generator",
        ),
        (
            ["roles.reward={kind: reward, backend: judged, uses: {judge: generater}}"],
            "roles.reward.uses.judge: reward 'judged' calls it by the handle 'judge', so it must be a generator; it is "
            "not defined (got 'generater')\n"
            "    is 'generator' meant? name a role of kind generator",
        ),
        (
            ["roles.reward={kind: reward, backend: judged, uses: {judge: reward}}"],
            "roles.reward.uses.judge: reward 'judged' would call its own role by the handle 'judge': a cycle, "
            "reward -> reward (got 'reward')\n"
            "    name a role of kind generator",
        ),
        (
            ["roles.reward={kind: reward, parts: [{backend: judged}]}"],
            "roles.reward.parts.0.uses: reward 'judged' needs roles of kind generator for the handles judge (got {})\n"
            "    assign a role to each handle, such as uses: {judge: generator}",
        ),
        (
            ["roles.reward.uses={judge: generator}"],
            "roles.reward.uses: reward 'math' calls no other role (got {'judge': 'generator'})\n    remove uses",
        ),
        (
            ["roles.reward={kind: reward, parts: [{backend: math}], uses: {judge: generator}}"],
            "roles.reward.uses: uses is for the one backend of a role, and this role combines parts "
            "(got {'judge': 'generator'})\n"
            "    set the uses of each part (parts.0.uses)",
        ),
    ],
    "steps_are_rewarded": [
        (
            ["algorithm.options.supervision=process"],
            "roles.reward: algorithm 'grpo' is to learn from rewards of steps, and no part gives them (got 'math')\n"
            "    use a reward that does (such as process), or set algorithm.options.supervision to outcome",
        ),
    ],
    "algorithm_roles": [
        (
            ["~roles.reward"],
            "roles.reward: the algorithm needs a role 'reward' of kind reward\n"
            "    algorithm.name = 'grpo' (<text>:7)\n    add roles.reward with kind: reward",
        ),
        (
            ["~roles.reward", "roles.rewards={kind: reward, backend: math}"],
            "roles.reward: the algorithm needs a role 'reward' of kind reward\n"
            "    algorithm.name = 'grpo' (<text>:7)\n    is 'rewards' meant? add roles.reward with kind: reward",
        ),
        (
            ["roles.reward={kind: trainer, backend: fsdp}"],
            "roles.reward.kind: the algorithm needs a reward as 'reward' (got 'trainer')\n"
            "    algorithm.name = 'grpo' (<text>:7)\n    set kind: reward",
        ),
    ],
    "weight_sync_fits": [
        (
            ["weight_sync.options={x: 1}"],
            "weight_sync.options: options belong to a named transport, and backend is 'auto' (got {'x': 1})\n"
            "    weight_sync.backend = 'auto' (default)\n    name the backend, or remove options",
        ),
        (
            ["weight_sync.backend=boxes"],
            "weight_sync.backend: transport 'boxes' carries export 'boxes'; trainer 'fsdp' exports 'full_tensors' "
            "(got 'boxes')\n    roles.trainer.backend = 'fsdp' (<text>:11)\n"
            "    roles.generator.backend = 'transformers' (<text>:14)\n"
            "    choose another transport, or 'auto' (chatlearn plugins matrix shows what fits together)",
        ),
        (
            ["weight_sync.backend=disk"],
            "weight_sync.backend: transport 'disk' delivers by channel 'checkpoint' between hosts; "
            "generator 'transformers' takes channels 'tensors' (got 'disk')\n"
            "    roles.trainer.backend = 'fsdp' (<text>:11)\n    roles.generator.backend = 'transformers' (<text>:14)\n"
            "    choose another transport, or 'auto' (chatlearn plugins matrix shows what fits together)",
        ),
        (
            ["roles.generator.backend=adapters", "weight_sync.backend=direct"],
            "weight_sync.backend: payload 'full' is asked for; payloads are: trainer 'fsdp' 'full', "
            "transport 'direct' 'full', generator 'adapters' 'adapter' (got 'direct')\n"
            "    roles.trainer.backend = 'fsdp' (<text>:11)\n    roles.generator.backend = 'adapters' (MARK)\n"
            "    choose another transport, or 'auto' (chatlearn plugins matrix shows what fits together)",
        ),
        (
            ["weight_sync.backend=collective", "weight_sync.fleet_rule=rolling"],
            "weight_sync.backend: transport 'collective' moves the weights to all replicas in one collective; the "
            "fleet rule 'rolling' brings them to a few at a time (got 'collective')\n"
            "    roles.trainer.backend = 'fsdp' (<text>:11)\n    roles.generator.backend = 'transformers' (<text>:14)\n"
            "    choose another transport, or 'auto' (chatlearn plugins matrix shows what fits together)",
        ),
    ],
    "rolling_settings": [
        (
            ["weight_sync.max_loading=2"],
            "weight_sync.max_loading: limits how many replicas load weights at a time, but with 'barrier' all load "
            "together (got 2)\n"
            "    weight_sync.fleet_rule = 'barrier' (default)\n    remove it, or set fleet_rule: rolling",
        ),
    ],
    "auto_format_takes_no_options": [
        (
            ["data.train.0.options={x: 1}"],
            "data.train.0.options: options belong to a named format, and format is 'auto' (got {'x': 1})\n"
            "    data.train.0.format = 'auto' (default)\n    name the format, or remove options",
        ),
    ],
    "evaluation_has_data": [
        (
            ["eval.every=5"],
            "eval.every: configures evaluation, but there is no data.eval (got 5)\n    data.eval = [] (default)\n"
            "    add data.eval, or remove this setting",
        ),
        (
            ["eval.sampling={max_tokens: 8}"],
            "eval.sampling: configures evaluation, but there is no data.eval\n"
            "    data.eval = [] (default)\n    add data.eval, or remove this setting",
        ),
    ],
    "best_metric_is_produced": [
        (
            ["checkpoint.keep_best=1"],
            "checkpoint.keep_best: ranks checkpoints by 'eval/accuracy', which is never measured: "
            "there is no data.eval (got 1)\n    checkpoint.metric = 'eval/accuracy' (default)\n"
            "    data.eval = [] (default)\n"
            "    add data.eval, set another metric (reward), or set keep_best to 0",
        ),
        (
            ["checkpoint.keep_best=1", "data.eval=[{path: e}]", "eval.at_end=false"],
            "checkpoint.keep_best: ranks checkpoints by 'eval/accuracy', which is not measured after training starts "
            "(got 1)\n    checkpoint.metric = 'eval/accuracy' (default)\n    eval.every = 0 (default)\n"
            "    eval.at_end = False (MARK)\n    set eval.every, or set keep_best to 0",
        ),
    ],
    "completion_fits_model": [
        (
            ["model.max_length=512"],
            "sampling.max_tokens: leaves no room for a prompt: it must be less than the longest sequence (got 512)\n"
            "    model.max_length = 512 (MARK)\n    lower max_tokens or raise max_length",
        ),
        (
            ["roles.generator.model={path: m, max_length: 600}", "data.max_prompt_tokens=100"],
            "sampling.max_tokens: 100 prompt tokens and 512 completion tokens are more than the longest sequence, 600 "
            "(got 512)\n    data.max_prompt_tokens = 100 (MARK)\n    roles.generator.model.max_length = 600 (MARK)\n"
            "    lower one of the two or raise max_length",
        ),
        (
            ["model.max_length=600", "data.eval=[{path: e}]", "eval.sampling={max_tokens: 600}"],
            "eval.sampling.max_tokens: leaves no room for a prompt: it must be less than the longest sequence "
            "(got 600)\n    model.max_length = 600 (MARK)\n    lower max_tokens or raise max_length",
        ),
    ],
    "sets_name_what_exists": [
        (
            ["data.eval=[{path: aime24.jsonl}]", "eval.sets={hard: {datasets: [aime25]}}"],
            "eval.sets.hard.datasets.0: names no dataset of data.eval; Did you mean 'aime24'? data.eval has aime24 "
            "(got 'aime25')\n    correct it, or add the dataset to data.eval",
        ),
        (
            ["data.eval=[{path: a/test.jsonl}, {path: b/test.jsonl}]", "eval.sets={hard: {datasets: [test]}}"],
            "eval.sets.hard.datasets.0: names 2 datasets of data.eval (got 'test')\n"
            "    give each of them a different name (data.eval.N.name)",
        ),
        (
            ["data.eval=[{path: e}]", "eval.sets={hard: {datasets: [e, e]}}"],
            "eval.sets.hard.datasets.1: names the dataset twice (got 'e')\n    remove one",
        ),
        (
            ["data.eval=[{path: e}]", "eval.sets={a/b: {datasets: [e]}}"],
            "eval.sets.'a/b': the name of an evaluation set is part of its metrics' names: it must not be empty, "
            "'dataset', or hold a '/' (got 'a/b')\n    choose another name",
        ),
        (
            ["data.eval=[{path: e}]", "eval.sets={hard: {datasets: [e], reward: generator}}"],
            "eval.sets.hard.reward: names no role of kind reward; there are reward (got 'generator')\n"
            "    correct it, or add roles.generator",
        ),
    ],
    "several_samples_of_a_set_differ": [
        (
            ["data.eval=[{path: e}]", "eval.samples_per_prompt=4"],
            "eval.samples_per_prompt: evaluation is greedy: the 4 samples of a prompt would all be the same (got 4)\n"
            "    eval.sampling = None (default)\n"
            "    set eval.sampling with a temperature above 0, or remove samples_per_prompt",
        ),
        (
            ["data.eval=[{path: e}]", "eval.samples_per_prompt=4", "eval.sampling={temperature: 0.0}"],
            "eval.samples_per_prompt: evaluation is greedy: the 4 samples of a prompt would all be the same (got 4)\n"
            "    eval.sampling.temperature = 0.0 (MARK)\n"
            "    set eval.sampling with a temperature above 0, or remove samples_per_prompt",
        ),
        (
            ["data.eval=[{path: e}]", "eval.sets={hard: {datasets: [e], samples_per_prompt: 4}}"],
            "eval.sets.hard.samples_per_prompt: evaluation is greedy: the 4 samples of a prompt would all be the same "
            "(got 4)\n    eval.sets.hard.sampling = None (default)\n"
            "    set eval.sets.hard.sampling with a temperature above 0, or remove samples_per_prompt",
        ),
        (
            ["data.eval=[{path: e}]", "eval.k=[1, 8]"],
            "eval.k: k samples of a prompt are drawn from its 1, so 8 are too many (got [1, 8])\n"
            "    eval.samples_per_prompt = 1 (default)\n    lower k, or raise samples_per_prompt",
        ),
    ],
    "several_samples_differ": [
        (
            ["sampling.temperature=0.0"],
            "sampling.temperature: greedy sampling makes all 4 completions of a group the same: no reward differs "
            "within it (got 0.0)\n    algorithm.options.group_size = 4 (default)\n"
            "    set a temperature above 0 (1.0 samples from the policy itself), or group_size to 1",
        ),
    ],
    "mini_batches_have_samples": [
        (
            ["train.mini_batches=17"],
            "train.mini_batches: a step has 16 samples, fewer than its mini-batches (got 17)\n"
            "    train.prompts_per_step = 4 (<text>:20)\n    algorithm.options.group_size = 4 (default)\n"
            "    set mini_batches to 16 or less, or draw more prompts a step",
        ),
        (
            ["algorithm.name=sft", "train.mini_batches=5"],
            "train.mini_batches: a step has 4 samples, fewer than its mini-batches (got 5)\n"
            "    train.prompts_per_step = 4 (<text>:20)\n"
            "    set mini_batches to 4 or less, or draw more prompts a step",
        ),
    ],
}


def test_every_rule_has_a_case() -> None:
    elsewhere = {rule.__name__ for rule in (*ROLLOUT_RULES, *PATH_RULES, *SIZE_RULES)}  # rules/test_*.py
    assert {rule.__name__ for rule in RULES} - elsewhere == set(CASES)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [pytest.param(*case, id=f"{rule}-{index}") for rule, cases in CASES.items() for index, case in enumerate(cases)],
)
def test_rule(overrides: list[str], expected: str, valid: str, registry: PluginRegistry) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(valid, overrides, registry)
    heading, _, message = str(caught.value).partition("\n")
    assert heading == "1 problem in <text>:"
    for override in overrides:
        message = message.replace(f"override {override!r}", "MARK")
    mark, _, message = message.partition(": ")
    assert mark == "MARK" or mark.startswith("<text>:")
    assert message == expected


@pytest.mark.parametrize(
    "overrides",
    [
        ["roles.trainer.ranks=2", "runtime.backend=cluster"],
        ["roles.critic={kind: trainer, backend: fsdp, head: value}"],
        ["roles.generator.replicas=2", "roles.generator.engine={a: 1}"],
        ["roles.reward.replicas=4", "runtime.backend=cluster"],
        ["roles.trainer.device=cpu", "weight_sync.fleet_rule=barrier"],
        ["data.eval=[{path: e}]", "eval.samples_per_prompt=4", "eval.sampling={temperature: 0.1}"],
        ["sampling.temperature=0.0", "algorithm.options.group_size=1"],
        ["sampling.temperature=0.0", "algorithm.name=sft"],
        ["sampling.temperature=0.7", "algorithm.name=ratios"],
        ["sampling.temperature=0.0", "algorithm.options.group_size=1", "algorithm.name=ratios", "sampling.top_k=5"],
        ["algorithm.name=ratios", "roles.generator.backend=raw"],
        ["sampling.temperature=0.7", "roles.generator.backend=raw"],
        ["weight_sync.backend=direct"],
        ["checkpoint.keep_best=1", "checkpoint.metric=reward"],
        ["checkpoint.keep_best=1", "data.eval=[{path: e}]", "eval.every=2"],
        ["model.max_length=612", "data.max_prompt_tokens=100"],
        ["train.mini_batches=16"],
        ["~roles.generator", "~roles.reward", "algorithm.name=sft"],
        ["data.train.0={path: x, format: gsm8k, options: {}}"],
    ],
)
def test_at_the_limit_nothing_is_told(overrides: list[str], valid: str, registry: PluginRegistry) -> None:
    load_config(valid, overrides, registry)


def test_auto_tells_when_no_transport_fits(valid: str, registry: PluginRegistry) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(valid, ["roles.generator.backend=adapters"], registry)
    message = str(caught.value)
    assert "weight_sync.backend: no installed transport fits (got 'auto')" in message
    assert "    transport 'boxes' carries export 'boxes'; trainer 'fsdp' exports 'full_tensors'\n" in message
    assert "install a transport that fits, or choose another backend" in message


def test_a_wrong_value_causes_no_conflict_of_its_own(valid: str, registry: PluginRegistry) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(valid, ["train.prompts_per_step=many", "train.mini_batches=3", "roles.reward.kind=judge"], registry)
    assert len(caught.value.problems) == 2
