"""The contract of a source of tools: named tools with a schema, whose calls answer with text or raise an exception."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols import TOOL_NAME, Tool, ToolSource
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.loop_watch import blocks_of, least
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, nothing_is_printed

NUM_TOGETHER = 6
"""Calls of each case that are made at the same time."""
NUM_CANCELLED = 3
"""Calls of each case that are cancelled, each after one turn of the event loop more than the one before."""
BLOCK_S = 0.25
"""Time for which the calls of all cases may keep the event loop from other work, seconds."""
ODD_TEXTS = ("", " ", "\x00\x01", "9" * 400, "ä漢🙂\n" * 50, "(" * 3000, "../../etc/passwd", '{"name": 1')
ODD_VALUES: tuple[Any, ...] = (None, True, -1, 1e300, 10**400, "text", [], [[]], {}, {"": None})


@dataclass(slots=True, frozen=True)
class ToolCase:
    """A call and what must come of it."""

    arguments: Mapping[str, Any]
    """Arguments as the model gives them: JSON."""
    answer: str | None
    """Expected text; None: the schema refuses the arguments, or the call raises."""
    tool: str | None = None
    """Name of the tool; None: the only one."""
    error: str = ""
    """Part of the message if the call fails."""


@dataclass(slots=True, frozen=True)
class OpenSource:
    """A source with its tools."""

    source: ToolSource
    tools: Mapping[str, Tool]

    def tool(self, case: ToolCase) -> Tool:
        """The tool that a case calls."""
        if case.tool is not None:
            assert case.tool in self.tools, f"there is no tool {case.tool!r}, but {', '.join(self.tools)}"
            return self.tools[case.tool]
        assert len(self.tools) == 1, f"there are several tools, so cases must name theirs: {', '.join(self.tools)}"
        return next(iter(self.tools.values()))


OpenTools = Callable[[], OpenSource]


class ToolConformance(ConformanceSuite):
    """Contract tests that every source of tools must pass.

    A subclass sets ``backend``, ``options`` and ``cases``, and ``refused_options`` to options that ``open`` refuses.
    """

    kind: ClassVar[Kind] = "tool"
    settable: ClassVar[frozenset[str]] = ConformanceSuite.settable | {"cases", "refused_options"}
    cases: ClassVar[Sequence[ToolCase]]
    refused_options: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Options, valid by their model, that name something missing or wrong."""

    def test_is_a_source_of_tools(self, open_tools: OpenTools) -> None:
        """The object has the methods of ``ToolSource``, and ``open`` returns at least one ``Tool``, each name once."""
        source = self._built()
        missing = [name for name in ("open", "close") if not callable(getattr(source, name, None))]
        assert not missing, f"a method of chatlearn_core.protocols.ToolSource is missing: {', '.join(missing)}"
        source.close()
        assert open_tools().tools, "open returned no tool"

    def test_cases_can_tell_right_from_wrong(self, open_tools: OpenTools) -> None:
        """The cases call every tool, have two different answers at least, and one call that must fail."""
        opened = open_tools()
        called = {opened.tool(case).name for case in self.cases}
        assert called == set(opened.tools), f"no case calls {', '.join(sorted(set(opened.tools) - called))}"
        assert len({case.answer for case in self.cases} - {None}) >= 2, "set cases with two different answers at least"
        assert any(case.answer is None for case in self.cases), "set a case that must fail (answer None)"

    def test_names_and_schemas_fit_chat_templates(self, open_tools: OpenTools) -> None:
        """Names match ``TOOL_NAME``, descriptions are texts, and parameters are a JSON Schema of an object, as JSON.

        Templates write all of it into the prompt, and the environment checks arguments by the schema.
        """
        for tool in open_tools().tools.values():
            assert isinstance(tool.name, str), f"{tool.name!r} is no text"
            assert TOOL_NAME.fullmatch(tool.name), f"{tool.name!r} is no name of a tool; see TOOL_NAME"
            assert isinstance(tool.description, str), f"the description of {tool.name} is {tool.description!r}"
            assert tool.description.strip(), f"{tool.name} has no description, so no model knows what it is for"
            json.dumps(tool.for_template(), allow_nan=False)
            schema = tool.parameters
            assert schema.get("type") == "object", f"the schema of {tool.name} is not of an object: set type: object"
            try:
                _validator(tool).check_schema(schema)
            except SchemaError as error:
                pytest.fail(f"the schema of {tool.name} is not valid: at {error.json_path}: {error.message}")

    def test_options_leave_the_key_kind_free(self) -> None:
        """Configurations name the source by ``kind``, beside its options."""
        assert "kind" not in self.options_model().model_fields, "rename the option kind"

    def test_answers_are_those_of_the_cases(self, open_tools: OpenTools) -> None:
        """Every call of a case answers with its text, and arguments that are answered fit the schema; a call that must
        fail is refused by the schema or raises an exception with a message.
        """
        opened = open_tools()
        for index, case in enumerate(self.cases):
            self._assert_outcome(index, case, opened, self._run(_outcome(opened.tool(case), case.arguments)))

    def test_the_same_call_answers_the_same(self, open_tools: OpenTools) -> None:
        """Answers depend neither on earlier calls nor on their order, and another source of the same options agrees."""
        used, fresh = open_tools(), open_tools()
        for opened, cases in ((used, self.cases), (used, self.cases[::-1]), (fresh, self.cases[::-1])):
            for case in cases:
                outcome = self._run(_outcome(opened.tool(case), case.arguments))
                self._assert_outcome(self.cases.index(case), case, opened, outcome)

    def test_calls_at_once_are_independent(self, open_tools: OpenTools) -> None:
        """Many calls at a time answer what each answers alone: keep the state of a call out of ``self``."""
        opened = open_tools()
        calls = [(index, case) for _ in range(NUM_TOGETHER) for index, case in enumerate(self.cases)]

        async def together() -> list[Any]:
            return await asyncio.gather(*(_outcome(opened.tool(case), case.arguments) for _, case in calls))

        for (index, case), outcome in zip(calls, self._run(together()), strict=True):
            self._assert_outcome(index, case, opened, outcome)

    def test_wrong_arguments_do_no_harm(self, open_tools: OpenTools) -> None:
        """Arguments that do not fit the schema are an exception or a text; later calls answer as before.

        The environment shows the model an error before such a call is made, but not every caller does.
        """
        opened = open_tools()
        for case in self.cases:
            for arguments in _wrong_arguments(opened.tool(case), case.arguments):
                self._assert_harmless(opened.tool(case), arguments)
        self._assert_still_right(opened)

    def test_odd_arguments_do_no_harm(self, open_tools: OpenTools) -> None:
        """Whatever the model writes into an argument, the call ends, and later calls answer as before."""
        opened = open_tools()
        for case in self.cases:
            for arguments in _odd_arguments(opened.tool(case), case.arguments):
                self._assert_harmless(opened.tool(case), arguments)
        self._assert_still_right(opened)

    def test_a_cancelled_call_leaves_nothing(self, open_tools: OpenTools) -> None:
        """A call that is cancelled ends as cancelled, unless it was done before; later calls answer as before, and no
        thread or process is left when the source is closed.
        """

        async def cancelled(opened: OpenSource, case: ToolCase, turns: int) -> tuple[bool, bool]:
            task = asyncio.ensure_future(_outcome(opened.tool(case), case.arguments))
            for _ in range(turns):
                await asyncio.sleep(0)
            was_done = task.done()
            task.cancel()
            await asyncio.wait([task])
            return was_done, task.cancelled()

        with self.nothing_is_left():
            opened = open_tools()
            for index, case in enumerate(self.cases):
                for turns in range(1, NUM_CANCELLED + 1):
                    was_done, is_cancelled = self._run(cancelled(opened, case, turns))
                    assert was_done or is_cancelled, f"case {index} swallowed its cancellation"
            self._assert_still_right(opened)
            opened.source.close()

    def test_the_event_loop_stays_free(self, open_tools: OpenTools) -> None:
        """Calls let other coroutines run: all rollouts of the environment share the event loop.

        Answer in a thread or a process whatever takes milliseconds, and load in ``open``.
        """
        opened = open_tools()

        async def all_cases() -> None:
            for case in self.cases:
                await _outcome(opened.tool(case), case.arguments)

        def measure() -> float:
            return blocks_of(asyncio.wait_for(all_cases(), self.patience_s)).longest_s

        blocked_s = least(measure, BLOCK_S)
        assert blocked_s < BLOCK_S, f"the event loop stood still for {blocked_s:.2f} s during a call"

    def test_arguments_are_read_only(self, open_tools: OpenTools) -> None:
        """A call changes neither its arguments nor anything inside them."""
        opened = open_tools()
        for index, case in enumerate(self.cases):
            given = copy.deepcopy(dict(case.arguments))
            self._run(_outcome(opened.tool(case), given))
            assert given == case.arguments, f"case {index}: the arguments became {given}"

    def test_a_second_source_is_independent(self, open_tools: OpenTools) -> None:
        """Two sources in one process answer apart: the end of one is not that of the other."""
        first, second = open_tools(), open_tools()
        self._assert_still_right(first)
        first.source.close()
        self._assert_still_right(second)
        self._assert_still_right(open_tools())

    def test_closing_twice_is_fine(self, open_tools: OpenTools) -> None:
        """``close`` may be called again."""
        opened = open_tools()
        self._assert_still_right(opened)
        opened.source.close()
        opened.source.close()

    def test_closing_before_open_is_fine(self) -> None:
        """The constructor opens nothing, and ``close`` without ``open`` is fine: another source may fail first."""
        source = self._built()
        source.close()
        source.close()

    def test_wrong_options_are_an_error_of_open(self) -> None:
        """Options that name something missing or wrong are a ``ConfigError`` or ``BackendError`` of ``open``, and
        ``close`` is fine after it.
        """
        if not self.refused_options:
            not_applicable("the suite sets no refused_options")
        for options in self.refused_options:
            source = self.build()(self.options_model()(**options))
            try:
                with pytest.raises((ConfigError, BackendError)):
                    source.open()
            finally:
                source.close()

    def test_the_process_stays_as_it_was(self, open_tools: OpenTools, capfd: pytest.CaptureFixture[str]) -> None:
        """Nothing is printed to standard output; as in every test, what all code of the process shares is unchanged."""
        with nothing_is_printed(capfd):
            self._assert_still_right(open_tools())

    def test_closing_leaves_nothing(self, open_tools: OpenTools) -> None:
        """``close`` ends every process and thread of the source, and removes the files that it wrote."""
        with self.nothing_is_left():
            opened = open_tools()
            self._assert_still_right(opened)
            opened.source.close()

    @pytest.fixture
    def open_tools(self) -> Iterator[OpenTools]:
        """A function that builds a source and opens it; the fixture closes it after the test."""
        opened: list[ToolSource] = []

        def make() -> OpenSource:
            source = self._built()
            opened.append(source)
            tools = source.open()
            wrong = [tool for tool in tools if not isinstance(tool, Tool)]
            assert not wrong, f"open returned {wrong[0]!r}, which is no chatlearn_core.protocols.Tool"
            names = [tool.name for tool in tools]
            assert len(set(names)) == len(names), f"two tools have one name: {', '.join(map(str, names))}"
            return OpenSource(source, dict(zip(names, tools, strict=True)))

        yield make
        for source in opened:
            source.close()

    # Inside

    def _built(self) -> ToolSource:
        source: ToolSource = self.build()(self.make_options())
        return source

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(work, self.patience_s)

        return asyncio.run(bounded())

    def _assert_outcome(self, index: int, case: ToolCase, opened: OpenSource, outcome: Any) -> None:
        tool = opened.tool(case)
        refusal = _refusal(tool, case.arguments)
        if case.answer is None:
            said = outcome if isinstance(outcome, Exception) else refusal
            assert said is not None, f"case {index} must fail, and {tool.name} answered {outcome!r}"
            assert str(said).strip(), f"case {index}: {tool.name} raised {type(said).__name__} without a message"
            assert case.error in str(said), f"case {index}: the error is {said}, without {case.error!r}"
            return
        assert refusal is None, f"case {index}: the schema of {tool.name} refuses the arguments: {refusal}"
        raised = f"case {index}: {tool.name} raised {type(outcome).__name__}: {outcome}"
        assert not isinstance(outcome, Exception), raised
        assert isinstance(outcome, str), f"case {index}: {tool.name} returned a {type(outcome).__name__}, not a text"
        assert outcome == case.answer, f"case {index}: {tool.name} answered {outcome!r}, not {case.answer!r}"

    def _assert_harmless(self, tool: Tool, arguments: Mapping[str, Any]) -> None:
        shown = f"{arguments!s:.80}"
        try:
            outcome = self._run(_outcome(tool, copy.deepcopy(dict(arguments))))
        except BaseException as error:
            pytest.fail(f"{tool.name} ended with {type(error).__name__} for {shown}: {error}")
        assert isinstance(outcome, str | Exception), f"{tool.name} returned {outcome!r:.80} for {shown}"

    def _assert_still_right(self, opened: OpenSource) -> None:
        for index, case in enumerate(self.cases):
            self._assert_outcome(index, case, opened, self._run(_outcome(opened.tool(case), case.arguments)))


async def _outcome(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    """The answer of a call, or the exception that it raised; a cancellation is raised."""
    try:
        return await tool.run(arguments)
    except Exception as error:
        return error


def _validator(tool: Tool) -> Any:
    return validator_for(tool.parameters, default=Draft202012Validator)


def _refusal(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """Why the schema refuses arguments; None if it does not."""
    error = next(_validator(tool)(dict(tool.parameters)).iter_errors(dict(arguments)), None)
    return None if error is None else str(error.message)


def _wrong_arguments(tool: Tool, arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments that the schema refuses: with one missing, one more, and others of a wrong type."""
    found = [{key: value for key, value in arguments.items() if key != name} for name in arguments]
    found += [{}, {**arguments, "no_such_argument": 1}]
    found += [{**arguments, name: value} for name in arguments for value in ODD_VALUES]
    yield from (each for each in found if _refusal(tool, each) is not None)


def _odd_arguments(tool: Tool, arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Unusual arguments that the schema accepts."""
    found = [{**arguments, name: value} for name in arguments for value in (*ODD_TEXTS, *ODD_VALUES)]
    yield from (each for each in found if _refusal(tool, each) is None)
