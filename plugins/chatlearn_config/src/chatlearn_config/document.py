"""Converts YAML text to plain values, and records the line of every key.

Scalars follow YAML 1.1 as PyYAML reads it, with two exceptions: ``1e-4`` is a number (PyYAML requires ``1.0e-4``), and
dates and sexagesimal numbers (``12:30``) stay text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from chatlearn_config.problems import (
    KeyPath,
    Mark,
    Marks,
    Problem,
    nearest,
    show_path,
)

_MAX_NODES = 100_000
"""Maximum number of values after aliases are expanded; more indicate an expansion attack."""
MAX_DEPTH = 64
_MAX_INT = 2**63
"""No setting uses integers beyond 64 bits, and they break JSON readers."""

_NAN_INF = r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?" + _NAN_INF + r")$"
)
_INT = re.compile(r"^(?:[-+]?0b[01_]+|[-+]?0x[0-9a-fA-F_]+|[-+]?(?:0|[1-9][0-9_]*))$")
_SCALAR_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null")}
_OWN_RESOLVERS = {"tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp"}
_MERGE = "tag:yaml.org,2002:merge"


class DocumentError(ValueError):
    """A file that cannot be read, or text that is no YAML mapping; the message names file, line and rule."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalar rules above."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OWN_RESOLVERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


@dataclass(slots=True)
class Document:
    """A configuration as written: plain values and the place of each."""

    values: dict[Any, Any]
    marks: Marks
    problems: list[Problem] = field(default_factory=list)
    """Problems found while reading; all other values are usable."""
    unreadable: list[KeyPath] = field(default_factory=list)
    """Keys whose value could not be read and is None."""


def read_text(path: Path) -> str:
    """The file's text.

    Raises:
        DocumentError: the file is missing, unreadable or not UTF-8 (names the line).
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        similar = _similar_file(path)
        hint = f" Did you mean '{similar}'?" if similar else ""
        raise DocumentError(
            f"{path}: there is no such configuration file (relative paths start at the working directory).{hint}"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        reason = getattr(error, "strerror", None) or error
        raise DocumentError(f"{str(path)!r}: the configuration file cannot be read: {reason}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DocumentError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; a configuration file is UTF-8 text: "
            f"save it as such (iconv -f <its encoding> -t utf-8)"
        ) from error


def _similar_file(path: Path) -> str | None:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return None
    name = nearest(path.name, names)
    return str(path.parent / name) if name else None


def parse(text: str, source: str, sections: Sequence[str] = ()) -> Document:
    """Read one YAML document whose top level is a mapping.

    Args:
        text: YAML.
        source: The file's name, for messages.
        sections: The keys that every document has, at least two or none, for messages.

    Raises:
        DocumentError: a syntax error, a top level that is no mapping, or aliases that do not end; one line names it.
    """
    marks = Marks(source)
    root = compose(text, source)
    if root is None:
        needs = f"; it needs at least {', '.join(sections[:-1])} and {sections[-1]}" if sections else ""
        raise DocumentError(f"{source}: the file is empty{needs}")
    reader = NodeReader(marks)
    values = reader.read(root, ())
    if not isinstance(values, dict):
        example = f" ({', '.join(f'{section}: ...' for section in sections)})" if sections else ""
        raise DocumentError(
            f"{source}:{root.start_mark.line + 1}: the top level is {_TYPE_NAMES.get(type(values), 'no mapping')}; "
            f"it must be a mapping{example}"
        )
    return Document(values, marks, reader.problems, reader.unreadable)


_TYPE_NAMES = {list: "a list", str: "text", int: "a number", float: "a number", bool: "a boolean", type(None): "null"}


def compose(text: str, source: str) -> yaml.Node | None:
    """The node tree of one YAML document, None for an empty one.

    Raises:
        DocumentError: a syntax error; names line and column.
    """
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise DocumentError(f"{source}:{line}: character {error.character!r} is not allowed in YAML") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        context = f" {error.context}" if error.context else ""
        if error.context_mark and mark and error.context_mark.line != mark.line:
            context += f" (begun in line {error.context_mark.line + 1})"
        raise DocumentError(f"{place}: not valid YAML:{context} {error.problem or ''}".rstrip()) from error
    except RecursionError:
        raise DocumentError(f"{source}: nested too deeply; at most {MAX_DEPTH} levels are read") from None
    except (ValueError, OverflowError) as error:  # an escape for no valid character
        raise DocumentError(f"{source}: not valid YAML: {error}") from error


class NodeReader:
    """Turns nodes into plain values, recording the line of each and all problems."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.problems: list[Problem] = []
        self.unreadable: list[KeyPath] = []
        self._open: set[int] = set()
        self._count = 0
        self._scalars = yaml.constructor.SafeConstructor()

    def read(self, node: yaml.Node, path: KeyPath, at: yaml.Node | None = None) -> Any:
        """The value of ``node``; ``at`` is the node of its key, whose line is reported."""
        mark = Mark(self.marks.source, (at or node).start_mark.line + 1)
        self._count += 1
        if self._count > _MAX_NODES:
            raise DocumentError(f"{mark}: {show_path(path)}: more than {_MAX_NODES} values once aliases are expanded")
        if len(path) > MAX_DEPTH:
            raise DocumentError(f"{mark}: nested too deeply; at most {MAX_DEPTH} levels are read")
        if id(node) in self._open:
            raise DocumentError(f"{mark}: {show_path(path)}: an alias that contains itself")
        self.marks.by_path[path] = mark
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
                return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        finally:
            self._open.discard(id(node))
        return self._refuse(Problem(path, f"the tag {node.tag!r} is not supported", remedy="leave the tag out"))

    def _refuse(self, problem: Problem) -> None:
        self.problems.append(problem)
        self.unreadable.append(problem.path)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        if node.tag not in _SCALAR_TAGS:
            return self._refuse(Problem(path, f"the tag {node.tag!r} is not supported", remedy="leave the tag out"))
        try:
            value = self._scalars.construct_object(node)
        except (ValueError, KeyError, yaml.YAMLError) as error:
            rule = f"cannot be read as {node.tag.rpartition(':')[2]}: {error}"
            return self._refuse(Problem(path, rule, node.value))
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            return self._refuse(Problem(path, "holds half of a surrogate pair, which is no character", value))
        if isinstance(value, int) and abs(value) >= _MAX_INT:
            return self._refuse(Problem(path, "the number does not fit into 64 bits", node.value))
        return value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        own: dict[Any, Any] = {}
        lines: dict[Any, int] = {}
        pairs = sorted(node.value, key=lambda pair: pair[0].tag != _MERGE)  # merged keys first: own keys override them
        for key_node, value_node in pairs:
            if key_node.tag == _MERGE:
                merged.update(self._merged(value_node, path))
                continue
            line = key_node.start_mark.line + 1
            key = self._key(key_node, path)
            if key is None:
                continue
            if key in own:
                self.problems.append(
                    Problem(
                        (*path, key),
                        f"the key is written twice, in lines {lines[key]} and {line}",
                        remedy="keep one of the two",
                    )
                )
            lines[key] = line
            if key in own or key in merged:
                self.marks.replace((*path, key), {})
            own[key] = self.read(value_node, (*path, key), at=key_node)
        return merged | own

    def _key(self, node: yaml.Node, path: KeyPath) -> str | int | None:
        """The key, or None (with a problem recorded) if it is neither text nor a whole number."""
        shown = node.value if isinstance(node, yaml.ScalarNode) else f"({type(node).__name__})"
        path = (*path, shown.encode("utf-8", "replace").decode())
        self.marks.by_path[path] = Mark(self.marks.source, node.start_mark.line + 1)
        known = len(self.problems)
        value = self._scalar(node, path) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            if path[-1] != value:
                del self.marks.by_path[path]
            return value
        if len(self.problems) == known:
            self.problems.append(Problem(path, "a key must be text or a whole number", remedy="quote it"))
        return None

    def _merged(self, node: yaml.Node, path: KeyPath) -> dict[Any, Any]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: dict[Any, Any] = {}
        for source in reversed(sources):  # the first of several has priority
            if not isinstance(source, yaml.MappingNode):
                self.problems.append(Problem(path, "'<<' merges mappings only", remedy="write '<<: *anchor'"))
                continue
            if id(source) in self._open:
                raise DocumentError(f"{self.marks.locate(path)}: {show_path(path)}: an alias that contains itself")
            mark = self.marks.by_path[path]
            self._open.add(id(source))
            result |= self._mapping(source, path)
            self._open.discard(id(source))
            self.marks.by_path[path] = mark
        return result
