"""Run a flow function once on symbols and record its calls. Nothing is parsed from source text, nothing is patched."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from chatlearn_core.exceptions import FlowError
from chatlearn_core.flow.graph import METHODS, Graph, Method, Node

_HERE = Path(__file__).parent
SAMPLED_LOGPROBS = "generator_logprobs"
"""``token_data`` of every sample with a completion; no call of a flow may be named so that it writes there."""


def trace(
    flow: Callable[[Any, Any], Any],
    roles: Mapping[str, str],
    *,
    name: str | None = None,
    input_kind: Literal["prompts", "demonstrations"] = "prompts",
) -> Graph:
    """Call ``flow(prompts, m)`` once on symbols and return its checked graph.

    Args:
        flow: an ordinary function over roles, such as an algorithm's ``flow``.
        roles: configured role name -> kind (``trainer``, ``generator``, ``reward``).
        name: the graph's name; the function's own by default.
        input_kind: what the flow's first argument holds; prompts have no completion yet, demonstrations do.

    Raises:
        FlowError: a decision on data that is not there yet, an unknown role or method, a call with the wrong input,
            an unused result, or a missing return value. Names the source line and the remedy.
    """
    recorder = _Recorder(dict(roles), input_kind)
    flow_input = _Samples(recorder, frozenset(), is_input=True)
    result = flow(flow_input, _Roles(recorder))
    where = _definition(flow)
    if result is None:
        raise FlowError(f"{where}: the flow returns nothing; return the samples, for example m.join(samples, rewards)")
    if not isinstance(result, _Samples):
        raise FlowError(
            f"{where}: the flow returns {type(result).__name__}; it must return samples, as m.join(...) gives them"
        )
    used = _ancestors(recorder.nodes, result.nodes)
    for node in recorder.nodes:
        if node.index not in used:
            raise FlowError(
                f"{node.source}: the result of {node.name} is not used: pass it to m.join(...) in the returned value, "
                "or leave the call out"
            )
    kinds = {node.role: node.method.kind for node in recorder.nodes}
    return Graph(name or str(getattr(flow, "__name__", "flow")), tuple(recorder.nodes), kinds)


class _Recorder:
    """Collects the calls in order."""

    def __init__(self, roles: dict[str, str], input_kind: str) -> None:
        self.roles = roles
        self.input_kind = input_kind
        self.nodes: list[Node] = []

    def call(self, role: str, method: Method, value: _Samples) -> _Samples:
        node = Node(len(self.nodes), role, method, tuple(sorted(value.nodes)), _caller())
        duplicate = next((n for n in self.nodes if n.name == node.name and n.inputs == node.inputs), None)
        if duplicate is not None:
            raise FlowError(
                f"{node.source}: {node.name} is called twice on the same samples (first at {duplicate.source}); "
                "keep the first result in a variable"
            )
        self.nodes.append(node)
        return _Samples(self, frozenset({node.index}))


class _Samples:
    """Stands for the samples (or the flow's input) while a flow is traced."""

    __slots__ = ("is_input", "nodes", "recorder")

    def __init__(self, recorder: _Recorder, nodes: frozenset[int], *, is_input: bool = False) -> None:
        self.recorder = recorder
        self.nodes = nodes
        self.is_input = is_input

    def _refuse(self, action: str) -> NoReturn:
        raise FlowError(
            f"{_caller()}: the flow {action}, but while a flow is traced there is no data yet. Decide on settings "
            "(such as self.options) instead, or move the decision into the algorithm's prepare_samples or a reward"
        )

    def __bool__(self) -> bool:
        self._refuse("branches on samples (if, while, and, or, not)")

    def __len__(self) -> int:
        self._refuse("asks how many samples there are")

    def __iter__(self) -> Any:
        self._refuse("loops over samples")

    def __getitem__(self, key: object) -> Any:
        self._refuse(f"takes element {key!r} of samples")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"reads the attribute {name!r} of samples")

    def __eq__(self, other: object) -> bool:
        self._refuse("compares samples")

    __hash__ = None  # type: ignore[assignment]  # symbols are compared by nobody


class _Roles:
    """The flow's second argument: roles as attributes, and ``join``."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> _Role:
        if name.startswith("__"):
            raise AttributeError(name)
        roles = self._recorder.roles
        if name not in roles:
            hint = difflib.get_close_matches(name, roles, n=1)
            raise FlowError(
                f"{_caller()}: the flow uses the role {name!r}, which the configuration does not define. "
                f"Roles: {', '.join(sorted(roles)) or 'none'}."
                + (f" Did you mean {hint[0]!r}?" if hint else "")
                + f" Add it under roles.{name}"
            )
        return _Role(self._recorder, name, roles[name])

    def join(self, samples: Any, *parts: Any) -> _Samples:
        """The samples with everything that the other calls computed for them."""
        for value in (samples, *parts):
            if not isinstance(value, _Samples):
                raise FlowError(
                    f"{_caller()}: m.join takes samples and results of calls on roles, not {type(value).__name__}"
                )
        nodes = frozenset().union(*(value.nodes for value in (samples, *parts)))
        everything = _ancestors(self._recorder.nodes, nodes)
        sources = [n for n in self._recorder.nodes if n.index in everything and n.method.takes == "prompts"]
        if len(sources) > 1:
            raise FlowError(
                f"{_caller()}: m.join mixes samples of different calls: "
                + ", ".join(f"{n.name} ({n.source})" for n in sources)
                + ". Join only what was computed for the same samples"
            )
        return _Samples(self._recorder, nodes)


class _Role:
    """One role while a flow is traced; its methods record calls."""

    def __init__(self, recorder: _Recorder, name: str, kind: str) -> None:
        self._recorder, self._name, self._kind = recorder, name, kind

    def __getattr__(self, name: str) -> Callable[[Any], _Samples]:
        if name.startswith("__"):
            raise AttributeError(name)
        method = METHODS.get((self._kind, name))
        if method is None:
            known = [m for kind, m in METHODS if kind == self._kind]
            hint = difflib.get_close_matches(name, known, n=1)
            raise FlowError(
                f"{_caller()}: {self._name!r} is a {self._kind} and has no method {name!r}; it has "
                + ", ".join(known)
                + (f". Did you mean {hint[0]!r}?" if hint else "")
            )

        def call(value: Any, /) -> _Samples:
            if not isinstance(value, _Samples):
                raise FlowError(
                    f"{_caller()}: {self._name}.{name} takes {method.takes}, not {type(value).__name__} {value!r}"
                )
            if method.takes == "prompts" and not value.is_input:
                raise FlowError(
                    f"{_caller()}: {self._name}.{name} takes the flow's prompts, but is given samples of another call"
                )
            if method.takes == "samples" and not value.nodes and self._recorder.input_kind == "prompts":
                raise FlowError(
                    f"{_caller()}: {self._name}.{name} takes samples, but is given the flow's prompts, which have no "
                    "completion yet: call a generator role first"
                )
            if method.kind == "reward":
                self._check_scoring(method)
            elif method.field.format(role=self._name) == SAMPLED_LOGPROBS:
                raise FlowError(
                    f"{_caller()}: {self._name}.{name} would overwrite {SAMPLED_LOGPROBS!r}, the logprobs that came "
                    f"with the completions: rename the trainer role {self._name!r}"
                )
            return self._recorder.call(self._name, method, value)

        return call

    def _check_scoring(self, method: Method) -> None:
        """A reward judges what a generator sampled, and a sample has one reward."""
        recorder = self._recorder
        if recorder.input_kind == "demonstrations":
            raise FlowError(
                f"{_caller()}: {self._name}.{method.name} judges completions that a generator sampled, but the flow's "
                "input is demonstrations, which have none: leave the call out, or take prompts and call a generator "
                "role first"
            )
        first = next((node for node in recorder.nodes if node.method.kind == "reward"), None)
        if first is not None and first.role != self._name:
            raise FlowError(
                f"{_caller()}: {self._name}.{method.name} would overwrite the reward that {first.name} "
                f"({first.source}) gave: a sample has one reward. Combine several in one role: roles.{first.role}.parts"
            )


def _ancestors(nodes: list[Node], start: frozenset[int]) -> set[int]:
    """``start`` and every node they need."""
    reached: set[int] = set()
    waiting = list(start)
    while waiting:
        index = waiting.pop()
        if index not in reached:
            reached.add(index)
            waiting.extend(nodes[index].inputs)
    return reached


def _caller() -> str:
    """``file:line`` of the innermost frame outside this module: the flow's own line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent == _HERE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _definition(flow: Callable[..., Any]) -> str:
    """``file:line (name)`` of a function, as far as Python knows it."""
    function = inspect.unwrap(getattr(flow, "__func__", flow))
    code = getattr(function, "__code__", None)
    name = getattr(flow, "__qualname__", repr(flow))
    return f"{code.co_filename}:{code.co_firstlineno} ({name})" if code else name
