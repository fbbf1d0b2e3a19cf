"""Reward ``code``: formats of tests, and programs that try to look right."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from chatlearn_rewards import code_judging
from chatlearn_rewards.code_judging import build_code_judge, same_output
from chatlearn_rewards.code_options import CodeOptions
from chatlearn_rewards.code_reward import CodeReward, code_problem, last_block
from chatlearn_rewards.pool_worker import TaskConfigError
from chatlearn_sandbox.sandbox import SandboxError

ADD = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
CALLS = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]
HUMAN_EVAL = {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"}


@pytest.fixture(scope="module")
def judge():
    return make_judge(5.0)


def make_judge(timeout_s):
    return build_code_judge(
        {"wall_s": timeout_s, "memory_bytes": 256 << 20, "max_processes": 8, "output_bytes": 1 << 20},
        "namespaces",
        [],
        timeout_s=timeout_s,
        total_timeout_s=20.0,
        stop_at_failure=False,
        tolerance=0.0,
    )


def verdicts(judge, code, tests):
    answer = judge({"code": code, "tests": tests})
    return answer.get("verdicts", answer.get("error"))


@pytest.mark.parametrize(
    "form", [ADD, json.dumps(ADD), [{"input": "1 2", "output": "3"}, {"input": "3 4", "output": "7"}]]
)
def test_standard_input_and_output(judge, form):
    assert verdicts(judge, "print(sum(map(int, input().split())))", form) == ["passed", "passed"]
    assert verdicts(judge, "print(3)", form) == ["passed", "wrong_answer"]


@pytest.mark.parametrize(
    ("code", "tests", "expected"),
    [
        ("def add(a, b): return a + b", CALLS, ["passed", "passed"]),
        ("add = lambda a, b: 3", CALLS, ["passed", "wrong_answer"]),
        ("def add(a, b): return a + b", HUMAN_EVAL, ["passed"]),
        ("def plus(a, b): return a + b", HUMAN_EVAL, ["raised"]),
        ("class Solution:\n def add(self, a, b): return a + b",
         {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 8]}, ["passed", "wrong_answer"]),
        ("def add(a, b): return (a, b)", {"fn_name": "add", "inputs": ["1\n[2]"], "outputs": ["[1, [2]]"]}, ["passed"]),
        ("import math\ndef area(r): return math.pi * r * r",
         {"test_list": ["assert math.isclose(area(1), 3.141592653589793)"], "test_setup_code": "import math"},
         ["passed"]),
        ("def order(a): a.sort()", ["a = [3, 1]\norder(a)\nassert a == [1, 3]"], ["passed"]),
        ("def count():\n yield from (1, 2)", ["assert list(count()) == [1, 2]"], ["passed"]),
        ("def f(x):\n if x < 0: raise ValueError('low')\n return x",
         ["try:\n f(-1)\n assert False\nexcept ValueError as e:\n assert str(e) == 'low'"], ["passed"]),
        ("class Stack:\n def __init__(self): self.a = []\n def push(self, x): self.a.append(x)\n"
         " def __len__(self): return len(self.a)",
         ["s = Stack()\ns.push(2)\nassert len(s) == 1 and s.a == [2] and s.a[0] == 2"], ["passed"]),
        ("def f(): return {1: {2, 3}, 'k': (1, [b'x', 2.5, None, 10 ** 30])}",
         ["assert f() == {1: {2, 3}, 'k': (1, [b'x', 2.5, None, 10 ** 30])}"], ["passed"]),
        ("def add(a, b)", CALLS, ["raised", "raised"]),
        ("def g(f): return f(1)", ["assert g(lambda x: x) == 1"], "cannot run a test: a test hands the program a f"),
    ],
)  # fmt: skip
def test_calls_and_statements(judge, code, tests, expected):
    found = verdicts(judge, code, tests)
    assert found.startswith(expected) if isinstance(expected, str) else found == expected


HOSTILE = {
    "exits at once": ("import sys; sys.exit(0)", "wrong_answer", "raised"),
    "exits hard": ("import os; os._exit(0)", "wrong_answer", "ended"),
    "exits in the call": ("def add(a, b):\n import os; os._exit(0)", "wrong_answer", "ended"),
    "is always equal": (
        "class Any(int):\n def __eq__(self, other): return True\n __ne__ = __eq__\n"
        "class Other:\n def __eq__(self, other): return True\ndef add(a, b): return Any() if a == 1 else Other()",
        "wrong_answer",
        "wrong_answer",
    ),
    "replaces the checker": (
        "import builtins, gc, json, sys\nbuiltins.AssertionError = Exception\nbuiltins.print = lambda *a: None\n"
        "main = sys.modules['__main__']\nfor name in list(vars(main)):\n"
        " if callable(vars(main)[name]): setattr(main, name, lambda *a, **k: ['value', 3, None])\n"
        "def add(a, b): return -1",
        "wrong_answer",
        "ended",
    ),
    "writes verdicts": (
        "import os\nfor n in (1, 2, 3, 4, 5):\n try: os.write(n, b'{\"verdict\": \"passed\"}\\n' * 9)\n"
        " except OSError: pass\ndef add(a, b): return -1",
        "wrong_answer",
        "ended",
    ),
    "looks for the tests": (
        "import glob, os\ntext = ''.join(open(f, errors='replace').read() for f in glob.glob('/tmp/*'))\n"
        "def add(a, b): return 3 if 'assert ' + 'add' in text else -1",
        "wrong_answer",
        "wrong_answer",
    ),
    "loops": ("while True: pass", "timed_out", "timed_out"),
    "fills the memory": ("a = []\nwhile True: a.append(bytearray(1 << 24))", "out_of_memory", "out_of_memory"),
    "fills the memory with several processes": (
        "import os, time\nfor _ in range(6):\n if os.fork() == 0:\n  mine = bytearray(os.urandom(1 << 20)) * 60\n"
        "  time.sleep(99)\ntime.sleep(99)",
        "out_of_memory",
        "out_of_memory",
    ),
    "prints without end": ("while True: print('x' * 100000)", "too_much_output", "too_much_output"),
    "forks without end": ("import os\nwhile True: os.fork()", "raised", "raised"),
    "kills all": (
        "import os\nfor n in (os.getppid(), -1, os.getpid()):\n try: os.kill(n, 9)\n except OSError: pass",
        "ended",
        "ended",
    ),
    "defines the words of tests": ("def isinstance(*a): return True\ndef abs(x): return 0\ndef add(a, b): return -1",
                                   "wrong_answer", "wrong_answer"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_get_nothing_and_a_verdict(judge, name):
    code, stream, call = HOSTILE[name]
    if stream == "timed_out":
        judge = make_judge(0.3)
    tests = ["assert abs(add(1, 2) - 3) == 0 and isinstance(add(3, 4), int)"]
    assert verdicts(judge, code, {"inputs": ["1 2"], "outputs": ["3"]}) == [stream]
    assert verdicts(judge, code, tests if "words" in name else CALLS[:1]) == [call]


async def test_scores_and_components(use, make_sample):
    fenced = "So:\n```python\nprint(sum(map(int, input().split())))\n```\n"
    texts = [fenced, "no program", "```python\nprint(3)\n```", "```\nprint(1 / 0)\n```"]
    samples = [make_sample(text, ADD) for text in texts]
    samples.append(make_sample(fenced, "none"))
    samples.append(make_sample(fenced, ADD, 7))
    for scoring, third in (("all", -1.0), ("share", 0.0)):
        reward = use(CodeReward, CodeOptions(num_workers=2, incorrect=-1, scoring=scoring))
        results = await reward.score(samples)
        assert [result.value for result in results] == [1.0, -1.0, third, -1.0, None, 1.0]
        told = [{k for k, v in r.components.items() if v == 1 and k != "tests_passed"} for r in results]
        assert told == [{"accuracy"}, {"no_code"}, {"wrong_answer"}, {"raised"}, set(), {"accuracy"}]
        assert "prompt 'p0' has the ground truth 'none', which is not JSON" in results[4].error
        assert results[2].components.get("tests_passed") == (0.5 if scoring == "share" else None)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\nthen\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```\n3 4\n```json\n", "a\n"),
        ("```python\na\n```\n```text\nout\n```", "a\n"),
        ("~~~~python\na\n```\nb\n~~~~", "a\n```\nb\n"),
        ("```python\na\n```\n```python\ncut short", "a\n"),
        ("```python\ncut short", None),
        ("```python\n\n```", None),
        ("a = 1", None),
    ],
)
def test_the_last_closed_block_counts(text, code):
    assert last_block(text, unfenced="none") == code


def test_a_text_without_fences_may_be_code():
    assert last_block("a = 1", unfenced="whole") == "a = 1"
    assert last_block("```json\n1\n```", unfenced="whole") is None


@pytest.mark.parametrize(
    ("truth", "problem"),
    [
        (None, "has the ground truth None, which has no tests"),
        ("{", "which is not JSON"),
        ({"inputs": ["1"], "outputs": []}, "has inputs and outputs of 1 and 0; both must be lists of the same length"),
        ({"inputs": [1], "outputs": ["1"]}, "has the input or output 1, which is not a text"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "has the input 'x' or output '1', which is not JSON"),
        ({"inputs": [["x"]], "outputs": [{1, 2}], "fn_name": "f"}, "has inputs or outputs that are not JSON values"),
        (["assert f(1) =="], "has test_list 'assert f(1) ==', which is not valid Python"),
        ([], "has test_list []; it must be a list of statements, at least one"),
        ({"test": "pass", "entry_point": "f()"}, "and entry_point 'f()'"),
        ({"answer": 1}, "has a ground truth with the keys ['answer'], none of which give tests"),
    ],
)
def test_rows_without_tests_are_named(truth, problem):
    assert problem in code_problem(CodeOptions(), truth)
    assert code_problem(CodeOptions(), ADD) is None


@pytest.mark.parametrize(
    ("output", "expected", "tolerance", "same"),
    [
        ("1 \n2\n\n", "1\n2", 0, True),
        ("1\n\n2", "1\n2", 0, False),
        ("1.0001", "1", 0, False),
        ("x 1.0001", "x 1", 1e-3, True),
        ("1.01", "1", 1e-3, False),
        ("nan", "1", 1e-3, False),
        ("1 2", "1", 1e-3, False),
    ],
)
def test_outputs_are_compared_by_line(output, expected, tolerance, same):
    assert same_output(output, expected, tolerance) is same


def test_a_machine_without_namespaces_is_refused(monkeypatch):
    def refuse(self):
        raise SandboxError("the kernel refuses new namespaces (unshare): Operation not permitted")

    monkeypatch.setattr(code_judging.Sandbox, "check", refuse)
    settings = {"timeout_s": 1.0, "total_timeout_s": 2.0, "stop_at_failure": True, "tolerance": 0.0}
    with pytest.raises(TaskConfigError, match=r"Operation not permitted.*set isolation: none"):
        build_code_judge({}, "namespaces", [], **settings)


def test_options_that_leave_no_time_are_refused():
    with pytest.raises(ValidationError, match="raise total_timeout_s, or lower timeout_s"):
        CodeOptions(timeout_s=10, total_timeout_s=5)
