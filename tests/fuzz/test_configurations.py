"""Configurations by mutation of valid ones: what validates runs, and what does not is refused with a sentence."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chatlearn_core.config.load import load_config
from chatlearn_core.config.show import resolved_values
from chatlearn_core.plugins.loader import discover_plugins

RUN_EVERY = 4
"""In ``make test`` one of so many configurations is run if it is valid, the others are assembled."""
LONGEST_MESSAGE = 20_000
MOST_FAILURES = 5
"""Enough to see whether they have one cause."""

EDGES: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 64, 1000, 2**31, 2**40, 2**62, -(2**63)),
    *(0.0, -0.0, 1e-300, 0.5, 1.0, 1.5, 2.0, 1e9, 1e300, float("inf"), float("-inf"), float("nan")),
    *(True, False, None, [], {}, [1], ["a"], {"a": 1}, [[]], [{}], [None]),
    *(
        "",
        " ",
        "x",
        "auto",
        "none",
        "cpu",
        "cuda",
        "cuda:99",
        "gpu",
        "~",
        "~nosuchuser/x",
        ".",
        "/",
        "/dev/null",
        "a/b",
    ),
    *(
        "/proc/1/mem",
        "\0",
        "a\0b",
        "é",
        "\n",
        "${name}",
        "${nowhere}",
        "${oc.env:HOME}",
        "???",
        "1",
        "1e3",
        "[",
        "{a: 1}",
    ),
    *("n" * 300, "n/" * 3000, "<|im_end|>", "-" * 50_000),
]
"""Values that somebody writes, or that a program fills in."""
WORDS = [
    *(
        "none",
        "auto",
        "linear",
        "cosine",
        "sdpa",
        "eager",
        "bfloat16",
        "float32",
        "token_mean",
        "seq_mean_token_sum_norm",
    ),
    *("truncate", "mask", "sequence", "k1", "k2", "ratio", "std", "always", "rolling", "checkpoint"),
    *(
        "skip",
        "refuse",
        "special",
        "resume",
        "keep",
        "convert",
        "recompute",
        "value",
        "trainer",
        "reward",
        "fsdp",
        "math",
    ),
]
"""What options of the first-party plugins take."""
UNKNOWN_KEYS = ["", "x", "lr", "backend", "options", "a.b", "0", "\u00e9", "learning-rate"]


@pytest.fixture(scope="module")
def bases(tiny_model: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Valid configurations, small enough for a second each."""
    folder = tmp_path_factory.mktemp("demonstrations")
    demonstrations = folder / "sft.jsonl"
    rows = [{"prompt": f"what is {i} plus 1?", "completion": str(i + 1)} for i in range(8)]
    demonstrations.write_text("".join(json.dumps(row) + "\n" for row in rows))
    generator = {"kind": "generator", "backend": "transformers"}
    shared = {
        "output_dir": "run",
        "model": {"path": str(tiny_model)},
        "train": {"steps": 1, "prompts_per_step": 2},
        "runtime": {"backend": "local", "options": {"num_threads": 1}},
        "log": {"progress": False},
    }
    grpo = shared | {
        "data": {"train": [{"path": str(sums), "format": "prompt"}]},
        "algorithm": {"name": "grpo", "options": {"group_size": 2}},
        "roles": {
            "trainer": {"kind": "trainer", "backend": "fsdp", "options": {"learning_rate": 0.01}},
            "generator": generator,
            "reward": {"kind": "reward", "backend": "gsm8k"},
        },
        "sampling": {"max_tokens": 8},
    }
    several = grpo | {
        "data": {
            "train": [{"path": str(sums), "weight": 2.0, "name": "a"}, {"path": str(sums), "limit": 3, "name": "b"}],
            "eval": [{"path": str(sums), "limit": 2}],
            "max_prompt_tokens": 100,
        },
        "algorithm": {"name": "dr_grpo", "options": {"group_size": 2, "kl_coef": 0.1, "importance_correction": "mask"}},
        "roles": grpo["roles"]
        | {
            "reference": {"kind": "trainer", "backend": "fsdp"},
            "reward": {
                "kind": "reward",
                "parts": [
                    {"backend": "gsm8k", "weight": 0.5},
                    {"backend": "format", "options": {"pattern": ".*", "num_workers": 1}, "data_sources": ["a"]},
                ],
            },
        },
        "train": {"steps": 1, "prompts_per_step": 4, "mini_batches": 2, "epochs": 2},
        "rollout": {"partial": "resume", "round_tokens": 4},
        "eval": {"every": 1, "sampling": {"max_tokens": 4, "temperature": 1.0}, "samples_per_prompt": 2},
        "checkpoint": {"every": 1, "keep_best": 1},
        "weight_sync": {"backend": "direct"},
    }
    sft = shared | {
        "data": {"train": [{"path": str(demonstrations), "format": "sft"}]},
        "algorithm": {"name": "sft"},
        "roles": {"trainer": {"kind": "trainer", "backend": "fsdp", "options": {"schedule": "cosine"}}},
        "train": {"steps": 2, "prompts_per_step": 4, "mini_batches": 2},
    }
    return [grpo, several, sft]


def with_defaults(base: dict[str, Any]) -> dict[str, Any]:
    """The configuration with every setting and option."""
    return resolved_values(load_config(yaml.safe_dump(base), (), discover_plugins()))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(child, (*path, key))


def mutated(base: dict[str, Any], defaults: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A configuration with one to three settings changed; ``defaults`` is the same with every default."""
    paths = sorted(leaves(defaults), key=str)
    content: dict[str, Any] = json.loads(json.dumps(base))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        path = draw.choice(paths)
        match draw.randrange(20):
            case 0:
                remove(content, path)
            case 1:
                put(content, (*path[:-1], draw.choice(UNKNOWN_KEYS)), draw.choice(EDGES))
            case 2:  # a section where another one belongs
                put(content, path, at(content, draw.choice(paths)))
            case 3:  # twice, or under another name
                put(content, (*path[:-1], f"{path[-1]}2"), at(content, path))
            case 4 | 5 | 6 | 7:
                put(content, path, draw.choice(EDGES))
            case _:
                put(content, path, draw.choice(near(at(defaults, path))))
    return content


def near(value: Any) -> list[Any]:
    """Values like the one that is there, which have the best chance to be valid."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, max(0, value - 1), value * 2, value * 1000, -value, float(value)]
        case float():
            return [value * 2, value / 2, value * 1e6, -value, int(value) if abs(value) < 1e9 else 1]
        case str():
            return [*WORDS, value, f"{value}x", value[:-1], value.upper(), f"./{value}"]
        case list():
            return [value * 2, value[1:], [*value, None], ["a"], [0.5, 0.9], value[0] if value else 0]
        case None:
            return [1, 2, 4, 64, 0.5, 1e9, "a", "cpu", [], ["a"]]
    return EDGES


def at(content: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        try:
            content = content[part]
        except (KeyError, IndexError, TypeError):
            return None
    return content


def put(content: Any, path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        try:
            below = content[part]
        except (KeyError, IndexError, TypeError):
            below = None
        if not isinstance(below, dict | list):
            if not isinstance(content, dict):
                return
            below = content[part] = {}
        content = below
    if isinstance(content, dict) or (
        isinstance(content, list) and isinstance(path[-1], int) and path[-1] < len(content)
    ):
        content[path[-1]] = json.loads(json.dumps(value))


def remove(content: Any, path: tuple[Any, ...]) -> None:
    parent = at(content, path[:-1])
    if isinstance(parent, dict):
        parent.pop(path[-1], None)
    elif isinstance(parent, list) and isinstance(path[-1], int) and path[-1] < len(parent):
        del parent[path[-1]]


def test_what_validates_runs_and_the_rest_is_refused_with_a_sentence(
    cases: Any, bases: list[dict[str, Any]], bounded: Any
) -> None:
    defaults = [with_defaults(base) for base in bases]
    ends: Counter[str] = Counter()
    failures: list[str] = []
    for case in cases(quick=60):
        which = case.random.randrange(len(bases))
        text = yaml.safe_dump(mutated(bases[which], defaults[which], case.random), allow_unicode=True)
        run = cases.seconds is not None or case.number % RUN_EVERY == 0
        outcome = bounded("configuration_target.py:check", {"text": text, "overrides": [], "run": run}, timeout_s=60)
        if outcome.end == "returned":
            value = outcome.value
            ends[value["end"]] += 1
            told = value["by"] != "the run" or may_need_the_run(value["text"])
            if told and len(value["text"]) < LONGEST_MESSAGE:
                continue
        failures.append(f"{case.again}\n{text:.5000}\n{outcome.end} {outcome.output:.5000}\n{outcome.value}")
        if len(failures) == MOST_FAILURES:
            break
    print(dict(ends))
    assert not failures, "\n\n".join(failures)
    both = min(ends["refused"], ends["assembled"] + ends["completed"])
    assert cases.seconds is not None or both >= ends.total() / 20, f"the cases are nearly all of one kind: {ends}"


def may_need_the_run(text: str) -> bool:
    """Whether only a model, data or this machine could tell: everything else is validation's to say."""
    return text.startswith(("ModelError:", "DataError:")) or any(
        known in text for known in ("torch sees no CUDA device", "longest sequence of the model")
    )


def test_the_command_line_says_the_same(bases: list[dict[str, Any]], chatlearn: Any, tmp_path: Path) -> None:
    """What the other tests call in their processes is what the commands do."""
    content = bases[0] | {"roles": bases[0]["roles"] | {"critic": {"kind": "reward", "backend": "gsm8k"}}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    for command in (["config", "validate", file], ["run", file]):
        finished = chatlearn(*command)
        assert finished.code == 2
        assert "roles.critic is defined, but the flow of algorithm 'grpo' never calls it" in finished.output
    assert not (tmp_path / "run").exists()
