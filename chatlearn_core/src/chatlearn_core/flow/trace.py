"""Runs a flow function once on symbols and records its calls, without parsing source text or patching anything."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from chatlearn_core.exceptions import FlowError
from chatlearn_core.flow.call_arguments import checked_arguments, checked_function
from chatlearn_core.flow.graph import FunctionCall, Graph, Node, ancestors
from chatlearn_core.flow.source_line import caller, definition
from chatlearn_core.flow.symbols import Samples
from chatlearn_core.flow.vocabulary import FlowVocabulary
from chatlearn_core.plugins.records import FlowMethodSpec
from chatlearn_core.types import KEPT_IDS

SAMPLED_DATA = frozenset({"generator_logprobs", "generator_raw_logprobs", KEPT_IDS})
"""``token_data`` that completions bring; no call of a flow may overwrite it."""
MAX_CALLS = 1000
"""Maximum number of calls in one flow; more indicate an endless loop."""


def trace(
    flow: Callable[[Any, Any], Any],
    roles: Mapping[str, str],
    *,
    name: str | None = None,
    given: str | None = None,
    vocabulary: FlowVocabulary | None = None,
    uses: Mapping[str, Collection[str]] | None = None,
) -> Graph:
    """Call ``flow(examples, m)`` once on symbols and return its checked graph.

    Args:
        flow: an ordinary function over roles, such as an algorithm's ``flow``.
        roles: configured role name -> kind (``trainer``, ``generator``, ``reward``), including those of ``uses``.
        name: the graph's name; by default the function's name.
        given: kind of the examples that bring the flow's first samples, such as ``demonstrations``; None: the flow
            begins with prompts, and a generator makes the samples.
        vocabulary: the available calls; by default only the core's.
        uses: role -> the roles that it calls in turn.

    Raises:
        FlowError: the flow decides on data that does not exist yet, uses an unknown role, method or argument, makes a
            call with the wrong input, leaves a result unused, or returns nothing. Names the source line and the remedy.
    """
    recorder = _Recorder(dict(roles), given, vocabulary or FlowVocabulary.builtin(), uses or {})
    result = flow(Samples(), _Roles(recorder))
    where = definition(flow)
    if result is None:
        raise FlowError(f"{where}: the flow returns nothing; return the samples, for example m.join(samples, rewards)")
    if inspect.iscoroutine(result):
        result.close()
        raise FlowError(f"{where}: the flow is an async function; it only describes calls, so write it without async")
    if not isinstance(result, Samples):
        raise FlowError(
            f"{where}: the flow returns {type(result).__name__}; it must return samples, as m.join(...) gives them"
        )
    recorder.check_all_used(result)
    recorder.check_order()
    kinds = {node.role: node.kind for node in recorder.nodes if node.function is None}
    used = {name: roles[name] for node in recorder.nodes for name in node.uses}
    return Graph(name or str(getattr(flow, "__name__", "flow")), tuple(recorder.nodes), kinds, used)


class _Recorder:
    """Collects the calls in order and checks each against the earlier ones."""

    def __init__(
        self, roles: dict[str, str], given: str | None, vocabulary: FlowVocabulary, uses: Mapping[str, Collection[str]]
    ) -> None:
        self.roles = roles
        self.uses = uses
        self.given = given
        self.vocabulary = vocabulary
        self.nodes: list[Node] = []
        self._by_call: dict[tuple[str, tuple[int, ...]], Node] = {}
        """Calls by what they are and the samples that they take."""
        self._writers: dict[str, list[Node]] = {}
        """Calls by the data that they write, in the order of the flow."""

    def call(
        self,
        role: str,
        method: FlowMethodSpec,
        value: Samples,
        arguments: dict[str, Any],
        function: FunctionCall | None = None,
    ) -> Samples:
        """Record one call on a role, or of a function."""
        source = caller()
        if len(self.nodes) == MAX_CALLS:
            raise FlowError(
                f"{source}: the flow makes more than {MAX_CALLS} calls: a loop in it has no end, or too many rounds. "
                "Loop over a constant range, such as for turn in range(2)"
            )
        label = f"{role}.{method.method}" if function is None else f"m.apply({function.name!r})"
        given_name = arguments.pop("name", None)
        if given_name is not None and not (isinstance(given_name, str) and given_name.isidentifier()):
            raise FlowError(
                f"{source}: {label}(name={given_name!r}): a name is letters, digits and '_', and begins with no digit"
            )
        index = len(self.nodes)
        node = Node(
            index,
            role,
            method,
            tuple(sorted(value.nodes)),
            source,
            checked_arguments(label, method, arguments, self.vocabulary, source),
            given_name,
            tuple(self._output(name, label, source) for name in method.outputs),
            (index,) if method.takes == "examples" else value.samples_of,
            function,
            tuple(sorted(self.uses.get(role, ()))),
        )
        self._check(node)
        self.nodes.append(node)
        self._by_call[node.call, node.inputs] = node
        for field in node.fields:
            self._writers.setdefault(field, []).append(node)
        return Samples(frozenset({index}), node.samples_of)

    def _output(self, name: str, label: str, source: str) -> Any:
        if name not in self.vocabulary.outputs:
            raise FlowError(
                f"{source}: {label} requests the output {name!r}, which no installed plugin describes "
                f"(chatlearn_outputs); there are {', '.join(sorted(self.vocabulary.outputs))}"
            )
        return self.vocabulary.outputs[name]

    def _check(self, node: Node) -> None:
        """Check that a call is no duplicate, overwrites no data, and reads only data that exists."""
        twin = self._by_call.get((node.call, node.inputs))
        if twin is not None:
            raise FlowError(
                f"{node.source}: {node.name} is called twice on the same samples (first at {twin.source}); "
                "keep the first result in a variable"
            )
        for field in sorted(SAMPLED_DATA.intersection(node.fields)):
            raise FlowError(
                f"{node.source}: {node.name} would overwrite {field!r}, which came with the completions: "
                f"rename the trainer role {node.role!r}, or give the call a name=..."
            )
        for again, other in ((field, other) for field in node.fields for other in self._writers.get(field, ())):
            if _same_samples(node, other) and not self._changed_between(other, node):
                remedy = f"Give one of the two calls a name, such as {node.name}(samples, name='second')"
                if node.kind == "reward" and other.role != node.role:
                    remedy += f", or combine the rewards in one role: roles.{other.role}.parts"
                raise FlowError(
                    f"{node.source}: {node.name} would overwrite the {again} that {other.name} ({other.source}) gave. "
                    + remedy
                )
        before = [self.nodes[i] for i in ancestors(self.nodes, node.inputs)]
        are_sampled = any(one.kind in ("generator", "environment") for one in before)
        there = sorted(field for one in before for field in one.output_fields.values())
        for argument in (argument for output in node.outputs for argument in output.from_batch):
            data = node.arguments.get(argument)
            if data not in there and not (are_sampled and data == KEPT_IDS):
                raise FlowError(
                    f"{node.source}: {node.name} reads {argument}={data!r}, which no earlier call adds to these "
                    f"samples; they have {', '.join(there) or 'none'}. Join the result of the call that makes it"
                )

    def _changed_between(self, earlier: Node, later: Node) -> bool:
        """Whether some call changes the samples after ``earlier`` and before ``later``."""
        return any(
            self.nodes[i].method.changes and earlier.index in ancestors(self.nodes, self.nodes[i].inputs)
            for i in ancestors(self.nodes, later.inputs)
        )

    def check_order(self) -> None:
        """Check that every call on changed samples comes before or after the change, and that data computed before a
        further turn is either computed again or used only by a function in between.
        """
        before = {node.index: ancestors(self.nodes, node.inputs) for node in self.nodes}
        for change in (node for node in self.nodes if node.method.changes):
            for node in self.nodes:
                apart = node.index not in before[change.index] and change.index not in before[node.index]
                if apart and node is not change and _same_samples(node, change):
                    first, second = sorted((node, change), key=lambda n: n.index)
                    raise FlowError(
                        f"{second.source}: {second.name} works on samples that {first.name} ({first.source}) works on, "
                        f"too, but {change.name} changes them, so one of the two must come first: pass the result of "
                        f"{first.name} to {second.name}, joined with m.join"
                    )
        for turn in (node for node in self.nodes if node.method.name == "generator.extend"):
            for stale in (self.nodes[i] for i in sorted(before[turn.index]) if self.nodes[i].fields):
                used = any(self.nodes[i].function and stale.index in before[i] for i in before[turn.index])
                again = any(turn.index in before[n.index] and set(stale.fields) <= set(n.fields) for n in self.nodes)
                if not (used or again):
                    raise FlowError(
                        f"{stale.source}: what {stale.name} computes does not cover the tokens that {turn.name} "
                        f"({turn.source}) adds: call it on the extended samples"
                    )

    def check_all_used(self, result: Samples) -> None:
        """Check that every call contributes to the flow's return value."""
        used = ancestors(self.nodes, result.nodes)
        for node in self.nodes:
            if node.index not in used:
                raise FlowError(
                    f"{node.source}: the result of {node.name} is not used: pass it to m.join(...) in the returned "
                    "value, or leave the call out"
                )


def _same_samples(one: Node, other: Node) -> bool:
    """Whether two calls work on some of the same samples."""
    return one.samples_of == other.samples_of or not set(one.samples_of).isdisjoint(other.samples_of)


class _Roles:
    """The flow's second argument: roles as attributes, ``join``, ``join_groups`` and ``apply``."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> _Role:
        if name.startswith("__"):
            raise AttributeError(name)
        roles = self._recorder.roles
        if name not in roles:
            hint = difflib.get_close_matches(name, roles, n=1)
            raise FlowError(
                f"{caller()}: the flow uses the role {name!r}, which the configuration does not define. "
                f"Roles: {', '.join(sorted(roles)) or 'none'}."
                + (f" Did you mean {hint[0]!r}?" if hint else "")
                + f" Add it under roles.{name}"
            )
        return _Role(self._recorder, name, roles[name])

    def join(self, samples: Any, *parts: Any) -> Samples:
        """The samples with the results of all given calls."""
        values: tuple[Any, ...] = (samples, *parts)
        for value in values:
            if not isinstance(value, Samples):
                raise FlowError(
                    f"{caller()}: m.join takes samples and results of calls on roles, not {type(value).__name__}"
                )
        makers = sorted({index for value in values for index in value.samples_of})
        if any(value.samples_of != values[0].samples_of for value in values):
            raise FlowError(
                f"{caller()}: m.join mixes samples of different calls: "
                + ", ".join(f"{n.call} ({n.source})" for n in (self._recorder.nodes[i] for i in makers))
                + ". Join only what was computed for the same samples"
            )
        return Samples(frozenset().union(*(value.nodes for value in values)), values[0].samples_of)

    def join_groups(self, first: Any, second: Any, *more: Any) -> Samples:
        """The samples of several generations: each prompt's group holds the samples of all of them, in order."""
        values = (first, second, *more)
        seen: list[int] = []
        for value in values:
            if not isinstance(value, Samples):
                raise FlowError(f"{caller()}: m.join_groups takes samples, not {type(value).__name__}")
            if not value.samples_of:
                raise FlowError(
                    f"{caller()}: m.join_groups takes samples of generator calls, but is given the flow's input"
                )
            twice = next((i for i in value.samples_of if i in seen), None)
            if twice is not None:
                node = self._recorder.nodes[twice]
                raise FlowError(
                    f"{caller()}: m.join_groups is given the samples of {node.call} ({node.source}) twice; m.join puts "
                    "together what was computed for the same samples"
                )
            seen += value.samples_of
        return Samples(frozenset().union(*(value.nodes for value in values)), tuple(seen))

    def apply(
        self,
        function: Any,
        samples: Any = None,
        /,
        *more: Any,
        granularity: Any = "group",
        timeout_s: Any = 600.0,
        **arguments: Any,
    ) -> Samples:
        """Call a user's function on samples, off the event loop.

        Args:
            function: import string of ``function(samples: list[Sample], **arguments) -> list[Sample]``, async or not.
            samples: the samples to pass.
            granularity: ``sample``, ``group`` or ``batch``: how many samples one call gets.
            timeout_s: timeout of one call, seconds.
            **arguments: constants for the function; ``name`` only labels the call.
        """
        if not isinstance(samples, Samples) or more:
            raise FlowError(f"{caller()}: m.apply takes an import string, samples, and named arguments")
        if not samples.nodes and not self._recorder.given:
            raise FlowError(
                f"{caller()}: m.apply takes samples, but is given the flow's prompts, which have no completion yet: "
                "call a generator role first"
            )
        target = checked_function(function, granularity, timeout_s, arguments, caller())
        method = self._recorder.vocabulary.methods["function.apply"]
        return self._recorder.call("", method, samples, arguments, target)


class _Role:
    """One role while a flow is traced; its methods record calls."""

    def __init__(self, recorder: _Recorder, name: str, kind: str) -> None:
        self._recorder, self._name, self._kind = recorder, name, kind

    def __getattr__(self, name: str) -> Callable[..., Samples]:
        if name.startswith("__"):
            raise AttributeError(name)
        known = self._recorder.vocabulary.methods_of(self._kind)
        method = known.get(name)
        if method is None:
            hint = difflib.get_close_matches(name, known, n=1)
            raise FlowError(
                f"{caller()}: {self._name!r} is a {self._kind} and has no method {name!r}; it has "
                + (", ".join(known) or "none")
                + (f". Did you mean {hint[0]!r}?" if hint else "")
            )
        label = f"{self._name}.{name}"
        takes = "samples" if method.takes == "samples" else "prompts"

        def call(value: Any, /, *more: Any, **arguments: Any) -> Samples:
            if not isinstance(value, Samples):
                raise FlowError(f"{caller()}: {label} takes {takes}, not {type(value).__name__} {value!r}")
            if more:
                raise FlowError(f"{caller()}: {label} takes {takes} and named arguments, and is given {more[0]!r}")
            self._check_input(label, method, value)
            return self._recorder.call(self._name, method, value, arguments)

        return call

    def _check_input(self, label: str, method: FlowMethodSpec, value: Samples) -> None:
        given = self._recorder.given
        if method.takes == "examples" and given:
            raise FlowError(
                f"{caller()}: {label} takes prompts, but the flow's input is {given}, which bring their completions: "
                "leave the call out, or let the algorithm's input be prompts"
            )
        if method.takes == "examples" and value.nodes:
            raise FlowError(f"{caller()}: {label} takes the flow's prompts, but is given samples of another call")
        if method.takes == "samples" and not value.nodes and not given:
            raise FlowError(
                f"{caller()}: {label} takes samples, but is given the flow's prompts, which have no completion yet: "
                "call a generator role first"
            )
        if self._kind == "reward" and given:
            raise FlowError(
                f"{caller()}: {label} judges completions that a generator sampled, but the flow's input is "
                f"{given}, which have none: leave the call out, or take prompts and call a generator role first"
            )
