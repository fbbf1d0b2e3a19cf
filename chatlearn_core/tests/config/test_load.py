import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from chatlearn_core.config.invalid import InvalidConfigError
from chatlearn_core.config.load import load_config
from chatlearn_core.config.show import resolved_values, to_yaml
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.registry import PluginRegistry

FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def told(text: str, registry: PluginRegistry, *overrides: str) -> list[str]:
    """Every problem of a text, without the heading; a problem's further lines follow its first after ' | '."""
    with pytest.raises(InvalidConfigError) as caught:
        load_config(text, overrides, registry)
    heading, *lines = str(caught.value).split("\n")
    result: list[str] = []
    for line in lines:
        if line.startswith("    "):
            result[-1] += f" | {line.strip()}"
        else:
            result.append(line)
    plural = "" if len(result) == 1 else "s"
    assert heading == f"{len(result)} problem{plural} in <text>:"
    assert len(caught.value.problems) == len(result)
    return result


def test_valid(valid: str, registry: PluginRegistry) -> None:
    loaded = load_config(valid, (), registry)
    assert loaded.source == "<text>"
    assert loaded.config.train.steps == 10
    assert loaded.config.output_dir == "runs/run"
    assert loaded.resolved["train"] == {"steps": 10, "prompts_per_step": 4}
    assert list(loaded.choices) == ["algorithm", "roles.trainer", "roles.generator", "roles.reward", "runtime"]
    trainer = loaded.chosen("roles", "trainer")
    assert trainer is not None
    assert trainer.record.name == "fsdp"
    assert trainer.options.lr == 1e-3
    assert loaded.chosen("weight_sync") is None


def test_options_instances_of_every_choice(valid: str, registry: PluginRegistry) -> None:
    text = valid.replace("    backend: math", "    parts: [{backend: math}, {backend: format, options: {depth: 2}}]")
    loaded = load_config(
        text,
        [
            "roles.trainer.options={lr: 1, betas: [0.5, 0.6], schedule: {kind: cosine}}",
            "algorithm.options.group_size=8",
            "weight_sync.backend=direct",
            "log.loggers=[{name: console, options: {depth: 3}}]",
            "data.train.0.format=gsm8k",
        ],
        registry,
    )
    assert set(loaded.choices) == {
        "algorithm",
        "roles.trainer",
        "roles.generator",
        "roles.reward.parts.0",
        "roles.reward.parts.1",
        "weight_sync",
        "runtime",
        "log.loggers.0",
        "data.train.0",
    }
    options = loaded.choices["roles.trainer"].options
    assert options.lr == 1.0
    assert options.betas == (0.5, 0.6)  # a list may become a tuple
    assert options.schedule.kind == "cosine"
    assert loaded.choices["algorithm"].options.group_size == 8
    assert loaded.chosen("roles", "reward", "parts", 1).options.depth == 2
    assert loaded.chosen("log", "loggers", 0).options.depth == 3


def test_file_relative_paths_and_bom(valid: str, registry: PluginRegistry, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(valid, encoding="utf-8-sig")
    for name in (path, str(path)):
        loaded = load_config(name, (), registry)
        assert loaded.source == str(path)
        assert loaded.config.model.path == "models/tiny"


def test_all_problems_at_once(registry: PluginRegistry) -> None:
    text = """\
model: {path: models/tiny}
data:
  train:
    - path: a.jsonl
    - path: b.jsonl
      wieght: 2
algorithm: {name: grpoo}
roles:
  trainer:
    kind: trainer
    backend: fsdp
    ranks: 3
    options:
      max_tokens_per_microbatch: 4096
      lr: '1e-4'
      schedule: {kind: cosin}
  generator: {kind: generator, backend: transformers}
  reward: {kind: reward}
train:
  steps: ten
  prompts_per_step: 4
  epochs: ${train.epoch}
  steps: 0
eval:
  every: 5
sampling: {stop: [no]}
"""
    assert told(text, registry, "sampling.top_p=2", "nonsense") == [
        "<text>:6: data.train.1.wieght: unknown key (got 2) | did you mean 'weight'? | "
        "valid keys: path, format, split, weight, name, limit, options",
        "<text>:7: algorithm.name: No algorithm named 'grpoo' (<text>:7, algorithm.name). | "
        "installed: grpo, ratios, sft (acme 0.3.0) | Did you mean 'grpo'?",
        "<text>:12: roles.trainer.ranks: trainer 'fsdp' runs in at most 2 rank(s) (got 3) | "
        "roles.trainer.backend = 'fsdp' (<text>:11) | set ranks to 2, or choose another trainer",
        "<text>:12: roles.trainer.ranks: the runtime 'local' hosts one rank per role, in this process (got 3) | "
        "runtime.backend = 'local' (default) | set ranks to 1, or choose a distributed runtime "
        "(chatlearn plugins list)",
        "<text>:14: roles.trainer.options.max_tokens_per_microbatch: unknown key (got 4096) | "
        "did you mean 'max_tokens_per_micro_batch'? | valid keys: lr, max_tokens_per_micro_batch, schedule, betas",
        "<text>:15: roles.trainer.options.lr: must be a valid number (got '1e-4') | "
        "write it without quotes; from the environment: ${oc.decode:${oc.env:NAME}}",
        "<text>:16: roles.trainer.options.schedule.kind: must be 'constant' or 'cosine' (got 'cosin') | "
        "did you mean 'cosine'?",
        "<text>:18: roles.reward.backend: a reward role needs a backend, or parts to combine | "
        "name a reward (backend: math)",
        "<text>:22: train.epochs: Interpolation key 'train.epoch' not found (got '${train.epoch}') | "
        "did you mean 'train.epochs'?",
        "<text>:23: train.steps: the key is written twice, in lines 20 and 23 | keep one of the two",
        "<text>:23: train.steps: must be greater than or equal to 1 (got 0)",
        "<text>:25: eval.every: configures evaluation, but there is no data.eval (got 5) | data.eval = [] (default) | "
        "add data.eval, or remove this setting",
        "<text>:26: sampling.stop.0: must be a valid string (got False) | "
        "put it in quotes: YAML reads numbers, true, false, yes, no, on and off as something else than text",
        "override 'nonsense': (top level): an override has no '=' | write key=value to set a key, ~key to delete it",
        "override 'sampling.top_p=2': sampling.top_p: must be less than or equal to 1 (got 2)",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=1.5", "train.steps: must be a valid integer (got 1.5)"),
        (
            "train.steps='5'",
            "train.steps: must be a valid integer (got '5') | "
            "write it without quotes; from the environment: ${oc.decode:${oc.env:NAME}}",
        ),
        ("train.steps=true", "train.steps: must be a valid integer (got True)"),
        ("data.shuffle=1", "data.shuffle: must be a valid boolean (got 1)"),
        ("sampling=", "sampling: must be a mapping of keys to values (got None) | give it a value, or remove"),
        ("data.train=x", "data.train: must be a list (got 'x')"),
        ("data.train=[]", "data.train: must have at least 1 item(s) (got [])"),
        ("model=models/x", "model: must be a mapping of keys to values (got 'models/x')"),
        (
            "roles.reward.kind=rewards",
            "roles.reward.kind: must be 'trainer', 'generator', 'reward' or 'environment' (got 'rewards')",
        ),
        ("data.on_bad_row=skipp", "data.on_bad_row: must be 'error' or 'skip' (got 'skipp') | did you mean 'skip'?"),
        ("algorithm.options=3", "algorithm.options: must be a mapping of keys to values (got 3)"),
        ("roles.trainer.timeout_s=0", "roles.trainer.timeout_s: must be greater than 0 (got 0)"),
        ("trian={}", "trian: unknown key (got {}) | did you mean 'train'? | valid keys: name, output_dir, seed,"),
    ],
)
def test_wrong_types_and_values(override: str, expected: str, valid: str, registry: PluginRegistry) -> None:
    (problem,) = told(valid, registry, override)
    assert problem.startswith(f"override {override!r}: {expected}")


def test_missing_keys_say_what_they_are_for(valid: str, registry: PluginRegistry) -> None:
    assert told(valid, registry, "~train.prompts_per_step", "~model") == [
        "<text>:1: model: required key is missing",
        "<text>:18: train.prompts_per_step: required key is missing | Prompts (or demonstrations) drawn per step.",
    ]


def test_everything_missing(registry: PluginRegistry) -> None:
    problems = told("name: x\n", registry)
    assert [problem.split(": ")[1] for problem in problems] == ["model", "data", "algorithm", "roles", "train"]


def test_a_misspelled_backend_key_hides_nothing_and_causes_no_second_problem(
    valid: str, registry: PluginRegistry
) -> None:
    text = valid.replace("backend: fsdp", "bakend: fsdp\n    options: {lrr: 1}")
    assert [problem.split(" (")[0] for problem in told(text, registry)] == [
        "<text>:11: roles.trainer.bakend: unknown key",
        "<text>:12: roles.trainer.options.lrr: unknown key",
    ]


def test_an_option_beside_options_is_told_where_it_belongs(valid: str, registry: PluginRegistry) -> None:
    (problem,) = told(valid, registry, "roles.trainer.lr=1e-4")
    assert problem.startswith(
        "override 'roles.trainer.lr=1e-4': roles.trainer.lr: unknown key (got 0.0001) | "
        "it is one of the backend's options: move it below 'roles.trainer.options' | valid keys: kind, backend,"
    )


def test_a_model_that_ignores_unknown_keys_does_not_hide_them(valid: str, registry: PluginRegistry) -> None:
    assert told(valid, registry, "roles.trainer={kind: trainer, backend: careless, options: {dept: 1}}") == [
        "override 'roles.trainer={kind: trainer, backend: careless, options: {dept: 1}}': "
        "roles.trainer.options.dept: unknown key (got 1) | did you mean 'depth'? | valid keys: depth"
    ]


def test_plugin_faults_are_told_with_the_rest(valid: str, registry: PluginRegistry) -> None:
    problems = told(
        valid,
        registry,
        "roles.trainer.backend=missing_options",
        "roles.critic={kind: trainer, backend: raising, options: {level: 1}}",
        "train.steps=0",
    )
    assert len(problems) == 3
    assert any("The trainer backend 'missing_options' (acme 0.3.0) cannot be imported." in line for line in problems)
    assert any(
        "roles.critic.options: the options model of trainer 'raising' raised RuntimeError: boom" in line
        for line in problems
    )


def test_engine_is_looked_up_where_it_will_run(
    valid: str, registry: PluginRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = valid.replace("backend: transformers", "backend: engineless")
    (problem,) = told(text, registry)
    assert "needs acme-engine>=9; installed: none" in problem
    asked: list[str] = []

    def installed_in(python: str):
        asked.append(python)
        return lambda name: "9.1" if name == "acme-engine" else None

    monkeypatch.setattr("chatlearn_core.plugins.requirements.installed_in", installed_in)
    (problem,) = told(text, registry, "roles.generator.options.python=other/python")
    assert asked == ["other/python"]
    assert "roles.generator.options.python: unknown key" in problem  # the fake's options have no such key


def test_interpolated_values_are_checked_where_they_are_used(valid: str, registry: PluginRegistry) -> None:
    text = valid + "seed: ${model.path}\n"
    assert told(text, registry) == ["<text>:21: seed: must be a valid integer (got 'models/tiny')"]


def test_interpolation_cycle_names_lines(valid: str, registry: PluginRegistry) -> None:
    text = valid + "seed: ${eval.every}\neval:\n  every: ${seed}\n"
    assert told(text, registry) == [
        "<text>:21: seed: the interpolation leads back to itself (got '${eval.every}') | "
        "break the cycle with a plain value",
        "<text>:23: eval.every: the interpolation leads back to itself (got '${seed}') | "
        "break the cycle with a plain value",
    ]


def test_round_trip(valid: str, registry: PluginRegistry) -> None:
    overrides = [
        "name='yes'",
        "data.system_prompt='literal \\${name} ünïcode'",
        "roles.trainer.timeout_s=1e9",
        "roles.trainer.options.lr=1e-7",
        "roles.trainer.engine={a: [1, {b: null}], c: '007'}",
        "sampling.stop=['\\n', 'no', '1']",
        "eval.sampling=${sampling}",
        "data.eval=[{path: e.jsonl}]",
    ]
    first = load_config(valid, overrides, registry)
    assert first.config.data.system_prompt == "literal ${name} ünïcode"
    assert first.config.roles["trainer"].timeout_s == 1e9
    second = load_config(to_yaml(resolved_values(first)), (), registry)
    assert resolved_values(second) == resolved_values(first)
    assert {key: choice.options for key, choice in second.choices.items()} == {
        key: choice.options for key, choice in first.choices.items()
    }
    # model_dump itself is loadable too (no ${ to escape)
    plain = load_config(valid, (), registry).config
    assert load_config(to_yaml(plain.model_dump(mode="json")), (), registry).config == plain


def test_a_text_without_a_newline_is_a_path(registry: PluginRegistry) -> None:
    with pytest.raises(ConfigError, match="model: there is no such configuration file"):
        load_config("model", (), registry)


@FUZZ
@given(data=st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes, tmp_path: Path, registry: PluginRegistry) -> None:
    path = tmp_path / "fuzz.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError):
        load_config(path, (), registry)


TOKENS = re.findall(
    r"\S+",
    r"""
model data train roles algorithm options name path kind backend parts trainer reward ${name} ${ ${a.b} ${oc.env:X}
${oc.decode:'['} ${.x} \\${ ??? !!int !!binary !x &a *a << : : : - ? | > [ ] { }
, # ' " @ % --- ... 1 1e9 0x 0b .nan -.inf
null ~ true 99999999999999999999999 é
""",
)

YAML_PIECES = st.lists(
    st.one_of(
        st.sampled_from(TOKENS),
        st.sampled_from(["\n", "\n  ", "\n    ", "\n- ", ": ", " "]),
        st.text(max_size=5),
    ),
    max_size=30,
).map("".join)


@FUZZ
@given(text=YAML_PIECES)
def test_no_yaml_raises_anything_else(text: str, registry: PluginRegistry) -> None:
    with pytest.raises(ConfigError):
        load_config(text + "\n", (), registry)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["${name}", "${x", "???"]),
)
VALUES = st.recursive(
    LEAVES,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=4), below, max_size=3),
    max_leaves=6,
)


@settings(FUZZ, max_examples=40)  # each example that loads is loaded twice more
@given(data=st.data())
def test_no_value_anywhere_raises_anything_else(data: st.DataObject, valid: str, registry: PluginRegistry) -> None:
    paths = [
        "model", "model.path", "data", "data.train", "data.train.0", "data.train.0.path", "algorithm",
        "algorithm.name", "algorithm.options", "algorithm.options.group_size", "roles", "roles.trainer",
        "roles.trainer.kind", "roles.trainer.backend", "roles.trainer.options", "roles.trainer.options.schedule",
        "roles.trainer.options.betas", "roles.reward.parts", "roles.reward.parts.0", "weight_sync", "runtime",
        "runtime.backend", "log.loggers", "log.loggers.0", "eval.sampling", "train.mini_batches", "output_dir",
    ]  # fmt: skip
    path = data.draw(st.sampled_from(paths))
    value = (
        to_yaml({"v": data.draw(VALUES)})[3:].strip() if data.draw(st.booleans()) else data.draw(st.text(max_size=9))
    )
    try:
        loaded = load_config(valid, [f"{path}={value}"], registry)
    except ConfigError:
        return
    assert resolved_values(load_config(to_yaml(resolved_values(loaded)), (), registry)) == resolved_values(loaded)


def test_what_options_warn_of_has_a_place_and_refuses_nothing(valid, registry):
    assert load_config(valid, registry=registry).warnings == ()
    loaded = load_config(valid, ["algorithm.options.group_size=2000"], registry)
    assert loaded.warnings == (
        "override 'algorithm.options.group_size=2000': algorithm.options.group_size: so many are rarely worth it "
        "(got 2000)",
    )


def test_an_option_named_warnings_is_an_option(valid, registry, monkeypatch):
    class Options(BaseModel):
        warnings: bool = True

    monkeypatch.setattr("acme_options_of_config_tests.GroupOptions", Options)
    assert load_config(valid, registry=registry).warnings == ()
