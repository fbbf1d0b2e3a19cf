"""The template's tool with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

IS_SOURCE = "test_is_a_source_of_tools"
NAMES = "test_names_and_schemas_fit_chat_templates"
KIND = "test_options_leave_the_key_kind_free"
ANSWERS = "test_answers_are_those_of_the_cases"
SAME = "test_the_same_call_answers_the_same"
TOGETHER = "test_calls_at_once_are_independent"
WRONG = "test_wrong_arguments_do_no_harm"
ODD = "test_odd_arguments_do_no_harm"
CANCELLED = "test_a_cancelled_call_leaves_nothing"
LOOP = "test_the_event_loop_stays_free"
READ_ONLY = "test_arguments_are_read_only"
SECOND = "test_a_second_source_is_independent"
TWICE = "test_closing_twice_is_fine"
UNOPENED = "test_closing_before_open_is_fine"
REFUSED = "test_wrong_options_are_an_error_of_open"
AS_IT_WAS = "test_the_process_stays_as_it_was"
NOTHING_LEFT = "test_closing_leaves_nothing"

TOOL = 'Tool(self.options.name, "Finds lines that contain a word.", SCHEMA, self._run)'
THREADS = "self._threads = ThreadPoolExecutor("
ASKED = 'word, skip = arguments["word"], arguments.get("skip", 0)'
ANSWER = "return await loop.run_in_executor(self._threads, self._found, word, skip)"
SHOWN = 'return "\\n".join(found[skip : skip + self.options.max_lines])'
NO_LINE = 'raise ToolError(f"{len(found)} lines contain {word!r}, and {skip} are left out")'
READ = "except (OSError, UnicodeDecodeError) as error:"
RAISE = "raise ConfigError(f\"tool 'acme': {problem}\") from error"
CLOSE = "if self._threads is not None:"
CLOSED = "self._threads = None\n\n    async"
INIT = "self._lines: list[str] = []"


def _tool(name: str, caught_by: str, old: str, new: str, *also: tuple[str, str]) -> SourceMutant:
    return SourceMutant("tool", name, "tool.py", old, new, caught_by, also)


def _first(statement: str) -> str:
    """A statement at the beginning of a call."""
    return f"{ASKED}\n        {statement}"


MUTANTS = (
    _tool("no_close", IS_SOURCE, "def close(", "def closed("),
    _tool("no_tool", IS_SOURCE, f"return [{TOOL}]", "return []"),
    _tool("two_tools_of_one_name", IS_SOURCE, TOOL, f"{TOOL}, {TOOL}"),
    _tool("tools_are_dicts", IS_SOURCE, TOOL, f"{TOOL}.for_template()"),
    _tool("a_name_with_a_space", NAMES, "Tool(self.options.name,", "Tool(self.options.name + ' 1',"),
    _tool("a_long_name", NAMES, "Tool(self.options.name,", "Tool(self.options.name * 7,"),
    _tool("no_description", NAMES, '"Finds lines that contain a word."', '""'),
    _tool("a_type_that_json_schema_lacks", NAMES, '"type": "integer"', '"type": "int"'),
    _tool("a_schema_of_no_object", NAMES, 'SCHEMA = {\n    "type": "object",', "SCHEMA = {"),
    _tool("a_schema_that_is_no_json", NAMES, '"minimum": 0', '"minimum": float("-inf")'),
    SourceMutant(
        "tool", "an_option_kind", "options.py", "    max_lines", '    kind: str = "acme"\n    max_lines', KIND
    ),
    _tool("case_counts", ANSWERS, "wanted = word.casefold()", "wanted = word"),
    _tool("lines_from_zero", ANSWERS, "enumerate(self._lines, 1)", "enumerate(self._lines)"),
    _tool("a_line_more", ANSWERS, "skip + self.options.max_lines", "skip + self.options.max_lines + 1"),
    _tool("skip_is_ignored", ANSWERS, SHOWN, SHOWN.replace("[skip :", "[0 :")),
    _tool("nothing_found_is_no_error", ANSWERS, NO_LINE, 'return ""'),
    _tool("errors_are_answers", ANSWERS, NO_LINE, NO_LINE.replace("raise ToolError", "return str")),
    _tool("errors_say_nothing", ANSWERS, NO_LINE, "raise ToolError()"),
    _tool("errors_say_something_else", ANSWERS, NO_LINE, 'raise ToolError("failed")'),
    _tool("answers_are_lists", ANSWERS, SHOWN, "return found[skip : skip + self.options.max_lines]"),
    _tool("answers_are_bytes", ANSWERS, SHOWN, f"{SHOWN}.encode()"),
    _tool("further_arguments_are_ignored", ANSWERS, '"additionalProperties": False', '"additionalProperties": True'),
    _tool(
        "a_call_less",
        SAME,
        INIT,
        f"{INIT}\n        self.calls = 0",
        (ASKED, _first("self.calls += 1\n        if self.calls > 8:\n            raise ToolError('enough')")),
    ),
    _tool(
        "answers_number_the_calls",
        SAME,
        ASKED,
        _first("self.calls = getattr(self, 'calls', 0) + 1\n        skip = skip if self.calls < 9 else skip + 1"),
    ),
    _tool(
        "the_word_is_shared",
        TOGETHER,
        ASKED,
        _first("self.word = word\n        await asyncio.sleep(0)\n        word = self.word"),
    ),
    _tool(
        "one_call_at_a_time",
        TOGETHER,
        ANSWER,
        (
            "if getattr(self, 'busy', False):\n            raise ToolError('busy')\n        self.busy = True\n"
            "        try:\n            return await loop.run_in_executor(self._threads, self._found, word, skip)\n"
            "        finally:\n            self.busy = False"
        ),
    ),
    _tool(
        "wrong_arguments_end_the_process",
        WRONG,
        ASKED,
        _first("if not isinstance(word, str):\n            sys.exit('no word')"),
    ),
    _tool(
        "wrong_arguments_break_the_source",
        WRONG,
        ASKED,
        _first(
            "self.broken = getattr(self, 'broken', False) or not isinstance(word, str)\n        assert not self.broken"
        ),
    ),
    _tool(
        "wrong_arguments_hang",
        WRONG,
        ASKED,
        _first("while not isinstance(word, str):\n            await asyncio.sleep(0.1)"),
    ),
    _tool(
        "long_words_break_the_source",
        ODD,
        ASKED,
        _first("self.broken = getattr(self, 'broken', False) or len(word) > 1000\n        assert not self.broken"),
    ),
    _tool("control_characters_end_the_process", ODD, ASKED, _first("if '\\0' in word:\n            sys.exit(word)")),
    _tool("large_numbers_hang", ODD, ASKED, _first("while skip > 1 << 64:\n            await asyncio.sleep(0.1)")),
    _tool(
        "cancellation_is_swallowed",
        CANCELLED,
        ANSWER,
        (f"try:\n            {ANSWER}\n        except asyncio.CancelledError:\n            return 'cancelled'"),
    ),
    _tool(
        "a_cancelled_call_leaves_a_thread",
        CANCELLED,
        ANSWER,
        (
            f"try:\n            {ANSWER}\n        except asyncio.CancelledError:\n"
            "            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n            raise"
        ),
    ),
    _tool(
        "a_cancelled_call_leaves_a_process",
        CANCELLED,
        ANSWER,
        (
            f"try:\n            {ANSWER}\n        except asyncio.CancelledError:\n"
            "            subprocess.Popen(['sleep', '60'])\n            raise"
        ),
    ),
    _tool(
        "a_cancelled_call_is_never_forgotten",
        CANCELLED,
        ANSWER,
        (
            f"try:\n            {ANSWER}\n        except asyncio.CancelledError:\n"
            "            self.lost = getattr(self, 'lost', 0) + 1\n            raise"
        ),
        (ASKED, _first("if getattr(self, 'lost', 0) > 5:\n            raise ToolError('all workers are busy')")),
    ),
    _tool("sleeps_on_the_loop", LOOP, ASKED, _first("time.sleep(0.4)")),
    _tool(
        "computes_on_the_loop",
        LOOP,
        ASKED,
        _first("until = time.thread_time() + 0.4\n        while time.thread_time() < until:\n            pass"),
    ),
    _tool("takes_an_argument_out", READ_ONLY, ASKED, ASKED.replace("arguments.get", "arguments.pop")),
    _tool("fills_an_argument_in", READ_ONLY, ASKED, ASKED.replace("arguments.get", "arguments.setdefault")),
    _tool(
        "threads_of_all_sources",
        SECOND,
        THREADS,
        ("self._threads = AcmeTool.pool = getattr(AcmeTool, 'pool', None) or ThreadPoolExecutor("),
    ),
    _tool(
        "the_end_of_one_is_the_end_of_all",
        SECOND,
        ASKED,
        _first("assert not KEPT"),
        (CLOSED, "self._threads = None\n            KEPT.append(self)\n\n    async"),
    ),
    _tool("closing_twice_fails", TWICE, CLOSED, "del self.options\n\n    async"),
    _tool("closing_unopened_fails", UNOPENED, CLOSE, f"self._lines[0]\n        {CLOSE}"),
    _tool("the_file_is_read_before_open", REFUSED, INIT, f"{INIT}\n        Path(options.path).read_text()"),
    _tool("a_missing_file_is_empty", REFUSED, RAISE, "self._lines = [problem]"),
    _tool("the_error_of_the_system", REFUSED, READ, "except UnicodeDecodeError as error:"),
    _tool("prints", AS_IT_WAS, ASKED, _first("print(word)")),
    _tool("seeds_are_global", AS_IT_WAS, ASKED, _first("random.seed(0)")),
    _tool("changes_the_environment", AS_IT_WAS, THREADS, f"os.environ['ACME'] = '1'\n        {THREADS}"),
    _tool("changes_the_directory", AS_IT_WAS, THREADS, f"os.chdir('/')\n        {THREADS}"),
    _tool("threads_stay", NOTHING_LEFT, "self._threads.shutdown()", "KEPT.append(self._threads)"),
    _tool("a_process_stays", NOTHING_LEFT, THREADS, f"subprocess.Popen(['sleep', '60'])\n        {THREADS}"),
    _tool(
        "a_file_stays", NOTHING_LEFT, THREADS, (f"Path(tempfile.mkdtemp(), 'index').write_text('')\n        {THREADS}")
    ),
)
