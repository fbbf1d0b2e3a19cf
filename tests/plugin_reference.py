"""Writes ``docs/plugin-reference.md``: when, where and how often every hook and protocol method is called.

Read from the line ``Called: when; where; how often.`` of the docstrings; nothing is imported.

    python tests/plugin_reference.py
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = ROOT / "chatlearn_core" / "src" / "chatlearn_core"
PAGE = ROOT / "docs" / "plugin-reference.md"
HOOKS = CORE / "plugins" / "hookspec.py"
PROTOCOLS: dict[str, tuple[str, ...]] = {
    "Every backend": ("lifecycle", "memory"),
    "Trainers": ("trainer", "loss"),
    "Generators": ("generator",),
    "Rewards": ("reward", "role_handle"),
    "Environments": ("environment",),
    "Tools": ("tool",),
    "Weight syncs": ("weight_sync",),
    "Algorithms": ("algorithm",),
    "Decisions": ("decisions", "data_store"),
    "Data": ("format", "example_kind", "reader"),
    "Model families": ("model_family", "prompt_renderer"),
    "Loggers": ("logger",),
    "Rollout modes": ("rollout_producer",),
    "Runtimes": ("runtime",),
    "Launchers": ("launcher",),
}
"""Heading -> modules of ``protocols`` or ``data``, or of ``EXTENDED``."""
EXTENDED = {"RolloutProducer": "rollout_producer"}
"""Classes that plugins extend instead of a protocol -> their modules of ``executor``."""
OF_THE_CORE = {"Tokenizer", "DatasetSettings", "DataSettings"}
"""Protocols of ``data`` that no plugin implements for the core."""
INTRODUCTION = """\
# Plugin reference: what is called when

<!-- Written by tests/plugin_reference.py from the docstrings; do not edit. -->

Every hook and every method of the protocols: when it is called, in which process, and how often. What each takes,
returns and raises is in its docstring; [writing a plugin](writing-a-plugin.md) tells the rest. With the runtime `local`
all processes are the driver's, and trainers and environments have threads of their own.

A *step* is one round of rollouts and updates. A *route* leads weights from one trainer to the generators or trainers
that follow it.
"""


@dataclass(slots=True, frozen=True)
class Called:
    """One row of a table."""

    name: str
    when: str
    where: str
    how_often: str

    @classmethod
    def of(cls, name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Called:
        """Read from a docstring.

        Raises:
            ValueError: it has no such line, or one with another number of parts.
        """
        found = re.search(r"^Called: (.+?)\.$", ast.get_docstring(function) or "", re.MULTILINE | re.DOTALL)
        parts = [] if found is None else [" ".join(part.split()) for part in found[1].split(";")]
        if len(parts) != 3:
            raise ValueError(f"{name}: its docstring has no line 'Called: when; where; how often.', but {parts}")
        return cls(name, *parts)

    def row(self) -> str:
        """The row in Markdown."""
        cells = [part.replace("``", "`") for part in (self.when, self.where, self.how_often)]
        return f"| `{self.name}` | {' | '.join(cells)} |"


def hooks() -> list[Called]:
    """Every hook, in the order of ``hookspec.py``."""
    functions = [
        node for node in ast.parse(HOOKS.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
    ]
    return [Called.of(function.name, function) for function in functions]


def protocols(module: str) -> Iterator[tuple[str, list[Called]]]:
    """Each protocol of a module, or class that plugins extend, with its own methods."""
    folders = ("protocols", "data", "executor")
    file = next(file for folder in folders if (file := CORE / folder / f"{module}.py").is_file())
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        if "Protocol" not in {ast.unparse(base) for base in node.bases} and node.name not in EXTENDED:
            continue
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        if node.name in EXTENDED:  # plugins build it as they like
            methods = [method for method in methods if method.name != "__init__"]
        yield node.name, [Called.of(f"{node.name}.{method.name}", method) for method in methods]


def protocol_modules() -> set[str]:
    """Every module of ``protocols`` and ``data`` that has a protocol for plugins, and those of ``EXTENDED``."""
    found = set(EXTENDED.values())
    for folder in ("protocols", "data"):
        for file in (CORE / folder).glob("*.py"):
            names = re.findall(r"^class (\w+)\(.*\bProtocol\):", file.read_text(encoding="utf-8"), re.MULTILINE)
            if set(names) - OF_THE_CORE:
                found.add(file.stem)
    return found


def page() -> str:
    """The whole page."""
    head = ["| | when | where | how often |", "|---|---|---|---|"]
    registering = [hook for hook in hooks() if "plugins load" in hook.when or "command line" in hook.when]
    observing = [hook for hook in hooks() if hook not in registering]
    lines = [INTRODUCTION]
    for title, rows in (("Registering hooks", registering), ("Observing hooks", observing)):
        lines += [f"## {title}", *head, *(row.row() for row in rows), ""]
    for title, modules in PROTOCOLS.items():
        lines += [f"## {title}", *head]
        lines += [row.row() for module in modules for _, methods in protocols(module) for row in methods]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
