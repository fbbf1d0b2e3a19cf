"""What the documents say is true: examples are valid and run, commands and links exist, lists are complete.

A block of Python is executed, all those of a document in one namespace; one that begins with ``# src/acme/module.py``
is that module, and is imported. A block of YAML is checked as a configuration: a whole run as it is, a part of one on
top of a run that is valid. A block that cannot run has ``<!-- not run: reason -->`` on the line before it. One after
``<!-- from KIND/FILE -->`` is quoted from the template of that kind, whose tests run elsewhere.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command

from chatlearn_cli.main import app
from chatlearn_core.config.load import load_config
from chatlearn_core.config.models import RunConfig, Section
from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins import hookspec
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.sources import PluginSource

ROOT = Path(__file__).parent.parent
TEMPLATE = ROOT / "plugins/chatlearn_testing/src/chatlearn_testing/template"
MAX_NOT_RUN = 2
"""Blocks that may be exempt, over all documents."""
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("chatlearn_*/README.md")),
    *sorted(ROOT.glob("plugins/chatlearn_*/README.md")),
    ROOT / "benchmarks/README.md",
]
FENCE = re.compile(
    r"(?:^<!-- not run:(?P<reason>.*?)-->\n)?(?:^<!-- from (?P<source>\S+) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
MODULE = re.compile(r"# src/(\w+)/(\w+)\.py\n")
PART_OF_A_RUN: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"train": [{"path": "train.jsonl"}], "eval": [{"path": "heldout.jsonl"}]},
    "algorithm": {"name": "grpo"},
    "roles": {
        "trainer": {"kind": "trainer", "backend": "fsdp"},
        "generator": {"kind": "generator", "backend": "transformers"},
        "reward": {"kind": "reward", "backend": "math"},
    },
    "train": {"steps": 1, "prompts_per_step": 4},
}
"""What a part of a configuration is put on top of."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    document: Path
    language: str
    text: str
    not_run: str | None
    source: str | None
    """``kind/file`` of the template that it is quoted from."""
    line: int

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    return [
        Block(
            document,
            match["language"],
            match["text"],
            match["reason"],
            match["source"],
            text.count("\n", 0, match.start()) + 1,
        )
        for match in FENCE.finditer(text)
    ]


def prose(document: Path) -> str:
    """A document without its blocks."""
    return FENCE.sub("", document.read_text(encoding="utf-8"))


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def blocks_in(*languages: str) -> list[Block]:
    return [block for document in DOCUMENTS for block in blocks(document) if block.language in languages]


@pytest.fixture(scope="module")
def registry() -> Iterator[PluginRegistry]:
    """What is installed, and the documents' reward ``acme``. No engine is required: names and options count here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TEMPLATE / "reward/src")
        source = PluginSource("acme", "acme-reward", "0.1.0", lambda: importlib.import_module("acme_plugin.plugin"))
        found = discover_plugins(extra=[source])
        yield replace(found, entries=tuple(without_requirements(entry) for entry in found.entries))
    forget("acme_plugin")


def without_requirements(entry: PluginEntry) -> PluginEntry:
    if entry.status != "missing-engine":
        return entry
    record: Any = entry.record
    return replace(entry, status="ok", reason="", record=replace(record, requires=()))


def forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


# ------------------------------------------------------------------------------------------------------ examples


def test_blocks_are_found_and_exempt_ones_are_few_and_say_why() -> None:
    assert len(DOCUMENTS) >= 18
    assert len(blocks_in("python")) >= 12
    for document in DOCUMENTS:
        fences = re.findall(r"^```", document.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(document)), f"{name_of(document)}: a block is not closed, or is indented"
    exempt = [block for document in DOCUMENTS for block in blocks(document) if block.not_run is not None]
    assert len(exempt) <= MAX_NOT_RUN, [str(block) for block in exempt]
    assert all(block.not_run and block.not_run.strip() for block in exempt)


@pytest.mark.parametrize("block", blocks_in("yaml"), ids=str)
def test_yaml_is_valid_configuration(block: Block, registry: PluginRegistry) -> None:
    content = yaml.safe_load(block.text)
    if not {"model", "data", "algorithm", "roles", "train"} <= content.keys():
        content = on_top(content)
        load_config(yaml.safe_dump(content), (), registry)
    else:
        load_config(block.text, (), registry)


def on_top(part: Mapping[str, Any]) -> dict[str, Any]:
    """A run with the sections of ``part``; a role that says its kind takes the place of the run's."""
    whole: dict[str, Any] = {**PART_OF_A_RUN}
    for section, value in part.items():
        whole[section] = {**whole.get(section, {}), **value} if isinstance(value, dict) else value
    roles = {**PART_OF_A_RUN["roles"]}
    for name, role in part.get("roles", {}).items():
        roles[name] = role if "kind" in role else {**roles[name], **role}
    return whole | {"roles": roles}


@pytest.mark.parametrize("block", blocks_in("json"), ids=str)
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


QUOTED = [block for document in DOCUMENTS for block in blocks(document) if block.source is not None]


@pytest.mark.parametrize("block", QUOTED, ids=str)
def test_quoted_code_is_in_the_template(block: Block) -> None:
    assert block.source is not None
    kind, _, file = block.source.partition("/")
    assert block.text in (TEMPLATE / kind / "src/acme_plugin" / file).read_text(encoding="utf-8")


def test_every_template_is_a_worked_example() -> None:
    quoted = {str(block.source).partition("/")[0] for block in QUOTED}
    assert quoted == {folder.parent.parent.name for folder in TEMPLATE.glob("*/src/acme_plugin")}


PYTHON = [document for document in DOCUMENTS if any(block.language == "python" for block in blocks(document))]


@pytest.mark.parametrize("document", PYTHON, ids=name_of)
def test_python_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packages = write_modules(document, tmp_path / "src")
    monkeypatch.syspath_prepend(tmp_path / "src")
    namespace: dict[str, Any] = {"__name__": "documented"}
    sys.modules["documented"] = type(sys)("documented")  # where dataclasses look up names
    try:
        for block in blocks(document):
            if block.language != "python" or block.not_run is not None or block.source is not None:
                continue
            if module := MODULE.match(block.text):
                importlib.import_module(".".join(module.groups()))
            else:
                # Lines before it, so that a traceback shows the document's own line.
                exec(compile("\n" * block.line + block.text, name_of(document), "exec"), namespace)
    finally:
        del sys.modules["documented"]
        for package in packages:
            forget(package)


DOCUMENTED_SUITES = ("TestTransformersFamily", "TestLinear", "TestEarlyStop", "TestTruncated")
"""Classes in ``docs/testing-plugins.md`` whose backends are installed."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTED_SUITES)
def test_documented_suites_pass(name: str) -> None:
    from chatlearn_testing.check import run_suites

    document = ROOT / "docs/testing-plugins.md"
    namespace: dict[str, Any] = {"__name__": "documented"}
    for block in blocks(document):
        if block.language == "python" and block.not_run is None:
            exec(compile(block.text, name_of(document), "exec"), namespace)
    results = run_suites({name: namespace[name]})
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))


def write_modules(document: Path, source: Path) -> set[str]:
    """Write the blocks that are modules; returns their packages."""
    packages = set()
    for block in blocks(document):
        if module := MODULE.match(block.text):
            package, name = module.groups()
            packages.add(package)
            (source / package).mkdir(parents=True, exist_ok=True)
            (source / package / "__init__.py").touch()
            (source / package / f"{name}.py").write_text(block.text, encoding="utf-8")
    return packages


# ------------------------------------------------------------------------------------------------------ commands


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a block, as words; what a program prints is no command."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language == "console":
            line = line.removeprefix("$ ") if line.startswith("$ ") else ""
        if "..." in line:  # output that quotes a command, cut short
            continue
        for part in re.split(r" && | \| ", line):
            words = (
                shlex.split(part, comments=True) if re.match(r"(\.venv/bin/)?(chatlearn|make|python) ", part) else []
            )
            if words:
                yield [words[0].rpartition("/")[2], *words[1:]]


COMMANDS = [
    pytest.param(words, id=f"{block}: {' '.join(words)}")
    for block in blocks_in("console", "")
    for words in commands(block)
]


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_are_understood(words: list[str]) -> None:
    program, *arguments = words
    if program == "chatlearn":
        group, command, rest = resolve(arguments)
        command.make_context(group, list(rest))  # parses, and runs nothing
    elif program == "make":
        check_make(arguments)
    elif not arguments[0].startswith("-"):
        assert (ROOT / arguments[0]).is_file()


def resolve(words: list[str]) -> tuple[str, Any, list[str]]:
    """The command that the words name, and what is left of them.

    Raises:
        PluginError, click's UsageError: there is no such command.
    """
    command: Any = get_command(app)
    name = "chatlearn"
    while hasattr(command, "resolve_command") and words and not words[0].startswith("-"):
        context = command.context_class(command, info_name=name)
        name, command, words = command.resolve_command(context, words)
    return name, command, words


def check_make(arguments: list[str]) -> None:
    targets = [word for word in arguments if "=" not in word]
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert targets
    assert set(targets) <= rules


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_in_the_text_exist(document: Path) -> None:
    text = prose(document)
    for target in re.findall(r"`make ([^`]+)`", text):
        check_make(shlex.split(target))
    for code in re.findall(r"`chatlearn ([a-z][^`]*)`", text):
        _, command, rest = resolve(shlex.split(code))
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        unknown = [word for word in rest if word.startswith("-") and word.partition("=")[0] not in known]
        assert not unknown, f"`chatlearn {code}`: no such option: {unknown}"
        assert not hasattr(command, "resolve_command") or not rest, f"`chatlearn {code}`: no such command"


def test_a_wrong_command_is_found() -> None:
    with pytest.raises(PluginError, match="No command named 'trane'"):
        resolve(["trane"])
    name, command, rest = resolve(["report", "runs/first", "--max-rolouts", "3"])
    with pytest.raises(Exception, match="No such option"):
        command.make_context(name, rest)


# --------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{name_of(document)}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{name_of(document)}: {target}; there are {sorted(anchors(file))}"


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ------------------------------------------------------------------------------------------------------ complete


def test_every_setting_is_described() -> None:
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    missing = {f"{model.__name__}.{key}" for model in sections(RunConfig) for key in model.model_fields}
    missing = {setting for setting in missing if f"`{setting.partition('.')[2]}`" not in text}
    assert missing == set()


def sections(model: type[Section]) -> set[type[Section]]:
    """A section and all below it."""
    found = {model}
    for info in model.model_fields.values():
        pending = [info.annotation]
        while pending:
            annotation: Any = pending.pop()
            pending += getattr(annotation, "__args__", ())
            if inspect.isclass(annotation) and issubclass(annotation, Section) and annotation not in found:
                found |= sections(annotation)
    return found


def test_every_hook_is_described() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    hooks = [name for name in vars(hookspec) if name.startswith("chatlearn_")]
    assert len(hooks) >= 18
    assert [name for name in hooks if f"`{name}`" not in text] == []


def test_the_readme_lists_every_distribution_command_and_document() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    projects = [*ROOT.glob("chatlearn_*/pyproject.toml"), *ROOT.glob("plugins/chatlearn_*/pyproject.toml")]
    folders = {str(file.parent.relative_to(ROOT)) for file in projects}
    assert [folder for folder in folders if f"]({folder})" not in text] == []
    root = get_command(app)
    names = root.list_commands(typer.Context(root))  # type: ignore[arg-type]  # click's own type, or Typer's copy
    assert [name for name in names if f"| `chatlearn {name}` |" not in text] == []
    documents = [str(file.relative_to(ROOT)) for file in ROOT.glob("docs/*.md")]
    assert [file for file in documents if f"]({file})" not in text] == []


def test_every_first_party_plugin_is_named_in_a_document(registry: PluginRegistry) -> None:
    text = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    ours = [entry for entry in registry.entries if entry.distribution.startswith("chatlearn-")]
    assert [entry.name for entry in ours if entry.kind != "cli_command" and f"`{entry.name}`" not in text] == []


def test_no_document_is_of_one_machine() -> None:
    for document in [*DOCUMENTS, Path(__file__)]:
        found = re.findall(r"(?:^|[\s`'\"(=])/(?:root|home|work|tmp|mnt)/\S*", document.read_text(encoding="utf-8"))
        assert found == [], name_of(document)


# -------------------------------------------------------------------------------------------------------- a run


@pytest.mark.engine
def test_the_documented_algorithm_trains_and_every_metric_is_explained(
    tiny_model: Path, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from chatlearn_core.executor.assembly import assemble
    from chatlearn_core.executor.run import Run

    document = ROOT / "docs/algorithms.md"
    packages = write_modules(document, tmp_path / "src")
    assert packages == {"acme_raft"}
    monkeypatch.syspath_prepend(tmp_path / "src")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # the process is shared with other tests
    (tmp_path / "letters.py").write_text(
        "def f(completions, **columns):\n    return [sum(c in 'aeiou' for c in text) for text in completions]\n"
    )
    source = PluginSource("raft", "acme-raft", "0.1.0", lambda: importlib.import_module("acme_raft.plugin"))
    registry = discover_plugins(extra=[source])
    names: set[str] = set()
    try:
        for algorithm in ("raft", "grpo"):
            content = {
                "name": algorithm,
                "output_dir": str(tmp_path / algorithm),
                "model": {"path": str(tiny_model)},
                "data": {"train": [{"path": str(sums)}], "eval": [{"path": str(sums), "limit": 2}]},
                "algorithm": {"name": algorithm, "options": {"group_size": 2}},
                "roles": {
                    "trainer": {"kind": "trainer", "backend": "fsdp", "options": {"learning_rate": 0.01}},
                    "generator": {"kind": "generator", "backend": "transformers"},
                    "reward": {
                        "kind": "reward",
                        "backend": "function",
                        "options": {"path": f"{tmp_path}/letters.py:f", "num_workers": 1},
                    },
                },
                "sampling": {"max_tokens": 8},
                "train": {"steps": 1, "prompts_per_step": 4},
            }
            loaded = load_config(yaml.safe_dump(content), (), registry)
            summary = asyncio.run(Run(assemble(loaded, registry)).train("never"))
            assert summary["status"] == "completed"
            lines = [json.loads(line) for line in (tmp_path / algorithm / "metrics.jsonl").read_text().splitlines()]
            names |= {name for line in lines for name in line if name != "policy/nll"}
            if algorithm == "raft":
                assert 1 <= summary["totals"]["samples/trained"] <= 4, "one of each group of two, or none"
                assert lines[-1]["policy/grad_norm"] > 0
                assert lines[-1]["policy/nll"] > 0
    finally:
        for package in packages:
            forget(package)
    assert len(names) > 40
    explained = metric_patterns()
    assert sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in explained)) == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    left = {path.name for path in (tmp_path / "grpo").iterdir() if not path.name.startswith(".")}
    assert [name for name in left if f"| `{name}" not in readme] == [], "README.md: what a run leaves"


def metric_patterns() -> list[re.Pattern[str]]:
    """The names in the first column of the table of metrics; ``*`` stands for any part."""
    text = (ROOT / "docs/running.md").read_text(encoding="utf-8").partition("## Metrics")[2]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return [re.compile(re.escape(name).replace(r"\*", ".+")) for name in names]
