"""Damaged or malicious model directories: a run either refuses them with a clear message or works."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

TEMPLATE_TIMEOUT_S = 2.0
MOST_FAILURES = 5
RUN_EVERY = 4
"""In ``make test`` one of so many directories that are accepted is run, the others are only read."""
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATES: list[Any] = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "{% set ns = namespace(t='x') %}{% for i in range(20) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
    "{{ messages[9].content }}",
    "{{ raise_exception('no') }}",
    "{{ nothing() }}",
    "{% if %}",
    "{" * 50_000,
    "{{ 1 / 0 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__.os.system('echo no') }}",
    "{% include '/etc/passwd' %}",
    "",
    "x",
    "\ud800",
    TURN,
    TURN + "{{ '<|im_start|>assistant\n' if add_generation_prompt }}",
    [],
    ["x"],
    [{"name": "default", "template": TURN}, {"name": "tool_use", "template": "{{ x"}],
    [{"name": "other", "template": TURN}],
    [{"template": TURN}],
    {"default": TURN},
    7,
    None,
]
"""Chat templates, as ``tokenizer_config.json`` may hold them."""
VALUES: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 10**9, 2**63, 1e308, float("inf"), float("nan"), 0.5, True, None, "", "x", "4", [], {}),
    *([1], {"a": 1}, [[]], "\ud800", "<|im_end|>", "../other", "qwen2", "llama", "auto", "float16", "bfloat16", "sdpa"),
]


def change_field(directory: Path, draw: random.Random, name: str) -> None:
    """Another value for a field, somewhere in a JSON file."""
    content = json.loads((directory / name).read_text())
    sections = [content, *(value for value in content.values() if isinstance(value, dict) and value)]
    section = draw.choice(sections)
    key = draw.choice([*section, "num_labels", "auto_map", "rope_scaling", "quantization_config", "layer_types"])
    if draw.random() < 0.2:
        section.pop(key, None)
    else:
        section[key] = draw.choice(VALUES)
    (directory / name).write_text(json.dumps(content))


def change_config(directory: Path, draw: random.Random) -> None:
    change_field(directory, draw, "config.json")


def change_tokenizer_config(directory: Path, draw: random.Random) -> None:
    change_field(directory, draw, "tokenizer_config.json")


def change_tokenizer(directory: Path, draw: random.Random) -> None:
    change_field(directory, draw, "tokenizer.json")


def change_template(directory: Path, draw: random.Random) -> None:
    template = draw.choice(TEMPLATES)
    jinja = directory / "chat_template.jinja"
    if draw.random() < 0.5 and isinstance(template, str):
        jinja.write_bytes(template.encode("utf-8", "surrogatepass"))
        return
    jinja.unlink(missing_ok=True)
    if draw.random() < 0.3:
        (directory / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    content = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(content | {"chat_template": template}))


def damage_a_file(directory: Path, draw: random.Random) -> None:
    """Cut, empty, overwritten in places, replaced, gone."""
    file = draw.choice(sorted(path for path in directory.iterdir() if path.is_file()))
    data = bytearray(file.read_bytes())
    match draw.randrange(7):
        case 0:
            file.unlink()
        case 1:
            file.write_bytes(data[: draw.randrange(len(data) + 1)])
        case 2:
            file.write_bytes(b"")
        case 3:
            for _ in range(draw.choice([1, 4, 64])):
                data[draw.randrange(min(len(data), 4096))] = draw.randrange(256)
            file.write_bytes(data)
        case 4:
            file.unlink()
            file.mkdir()
        case 5:
            file.unlink()
            file.symlink_to(draw.choice([file, Path("/nowhere"), directory]))
        case 6:
            file.write_text(draw.choice(["[" * 100_000, '{"a":' * 50_000, "null", "[]", "{}", "3", '"x"', "\0\0\0\0"]))


def change_weights(directory: Path, draw: random.Random) -> None:
    """The header of the safetensors file says something else."""
    file = directory / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = draw.choice(sorted(name for name in header if name != "__metadata__"))
    match draw.randrange(6):
        case 0:
            del header[name]
        case 1:
            header[f"{name}.other"] = header.pop(name)
        case 2:
            header[name]["shape"] = draw.choice([[], [1], [2**40, 2**40], [-1], header[name]["shape"][::-1]])
        case 3:
            header[name]["dtype"] = draw.choice(["F16", "BF16", "F64", "I8", "BOOL", "X9"])
        case 4:
            header[name]["data_offsets"] = draw.choice([[0, 0], [0, 2**62], [8, 4], [-4, 4]])
        case 5:
            file.write_bytes(struct.pack("<Q", draw.choice([0, 1, 2**63, length - 1, length + 1])) + data[8:])
            return
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


def nonsense_weights(directory: Path, draw: random.Random) -> None:
    """Numbers that are none: NaN, infinity, and very large ones."""
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    start = 8 + length + 4 * draw.randrange((len(data) - 8 - length) // 8)
    for place in range(start, min(len(data) - 4, start + 4 * draw.choice([1, 100, 10_000])), 4):
        data[place : place + 4] = struct.pack("<f", draw.choice([float("nan"), float("inf"), 3e38, -3e38]))
    file.write_bytes(data)


def add_an_index(directory: Path, draw: random.Random) -> None:
    names = [
        "model.safetensors",
        "../config.json",
        "/etc/passwd",
        "nowhere.safetensors",
        "",
        "config.json",
        3,
        None,
        [],
    ]
    weight_map = draw.choice([{}, [], None, {"a": draw.choice(names)}, {str(i): "model.safetensors" for i in range(9)}])
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


DAMAGES: list[Callable[[Path, random.Random], None]] = [
    change_config,
    change_config,
    change_config,
    change_tokenizer_config,
    change_tokenizer,
    change_template,
    change_template,
    damage_a_file,
    damage_a_file,
    change_weights,
    change_weights,
    nonsense_weights,
    add_an_index,
]


@pytest.fixture
def configuration(sums: Path) -> Callable[[Path], str]:
    """A run with the model of a directory."""

    def text(model: Path) -> str:
        return yaml.safe_dump(
            {
                "output_dir": "run",
                "model": {"path": str(model), "max_length": 256},
                "data": {"train": [{"path": str(sums), "format": "prompt", "limit": 3}]},
                "algorithm": {"name": "grpo", "options": {"group_size": 2}},
                "roles": {
                    "trainer": {"kind": "trainer", "backend": "fsdp"},
                    "generator": {"kind": "generator", "backend": "transformers"},
                    "reward": {"kind": "reward", "backend": "gsm8k"},
                },
                "sampling": {"max_tokens": 8},
                "train": {"steps": 1, "prompts_per_step": 2},
                "runtime": {"options": {"num_threads": 1}},
                "log": {"progress": False},
            }
        )

    return text


def test_a_damaged_model_directory_is_refused_with_a_sentence_or_runs(
    cases: Any, tiny_model: Path, tmp_path: Path, configuration: Any, bounded: Any
) -> None:
    ends: Counter[str] = Counter()
    failures: list[str] = []
    for case in cases(quick=32):
        directory = tmp_path / "model"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(tiny_model, directory)
        damage = case.random.choice(DAMAGES)
        damage(directory, case.random)
        order = {
            "text": configuration(directory),
            "overrides": [],
            "run": case.number % 4 == 0 or cases.seconds is not None,
        }
        outcome = bounded("configuration_target.py:check", order | {"template_timeout_s": TEMPLATE_TIMEOUT_S})
        ends[outcome.end if outcome.end != "returned" else outcome.value["end"]] += 1
        if outcome.end != "returned":
            failures.append(f"{case.again}\n{damage.__name__}\n{outcome.end} {outcome.output:.6000}")
        if len(failures) == MOST_FAILURES:
            break
    print(dict(ends))
    assert not failures, "\n\n".join(failures)
    assert cases.seconds is not None or min(ends["refused"], ends["assembled"] + ends["completed"]) > 5, ends
