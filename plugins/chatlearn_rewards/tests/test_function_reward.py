from __future__ import annotations

import pytest
from pydantic import ValidationError

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.protocols import Reward
from chatlearn_rewards.function_reward import FunctionReward
from chatlearn_rewards.options import FunctionOptions


@pytest.fixture
def function(use, write_module):
    def make(source, name="f", **options):
        path = write_module("user/rewards.py", source)
        return use(FunctionReward, FunctionOptions(path=f"{path}:{name}", num_workers=1, **options))

    return make


async def test_compute_score_with_everything_it_may_ask_for(function, make_sample):
    reward = function(
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'tests'\n"
        "    return {'score': float(solution_str == ground_truth), 'bonus': extra_info['bonus']}\n"
    )
    assert isinstance(reward, Reward)
    samples = [make_sample("a", "a", extra_info={"bonus": 2}), make_sample("b", "a", extra_info={"bonus": 3})]
    results = await reward.score(samples)
    assert [(r.value, r.components) for r in results] == [(1.0, {"bonus": 2.0}), (0.0, {"bonus": 3.0})]


async def test_compute_score_with_other_names_by_the_option(function, make_sample):
    reward = function("def f(source, answer, truth):\n    return float(answer == truth)\n", signature="compute_score")
    assert [r.value for r in await reward.score([make_sample("a", "a"), make_sample("b", "a")])] == [1.0, 0.0]


async def test_lists_with_columns_and_none(function, make_sample):
    reward = function(
        "def f(prompts, completions, level, **columns):\n"
        "    assert prompts == ['What is it?'] * 2 and columns['ground_truth'] == [7, 8]\n"
        "    assert columns['completion_ids'] == [[3, 4, 5]] * 2\n"
        "    return [None if n is None else len(c) + n for c, n in zip(completions, level)]\n",
        batch_size=2,
    )
    first, second = await reward.score([make_sample("abc", 7, level=10), make_sample("ab", 8, level=None)])
    assert first.value == 13.0
    assert second.value is None
    assert "no score: the function returned None" in second.error


async def test_async_lists_and_chat_messages(function, make_sample):
    reward = function(
        "import asyncio\n"
        "async def f(prompts, completions, **columns):\n"
        "    await asyncio.sleep(0)\n"
        "    assert prompts[0] == [{'role': 'user', 'content': 'What is it?'}]\n"
        "    return [float(len(c[0]['content'])) for c in completions]\n",
        conversational=True,
    )
    assert [r.value for r in await reward.score([make_sample("abc"), make_sample("a")])] == [3.0, 1.0]


async def test_a_wrong_count_marks_its_call_only(function, make_sample):
    reward = function(
        "def f(prompts, completions, **columns):\n    return [1.0] * (len(completions) + ('bad' in completions))\n",
        batch_size=2,
    )
    results = await reward.score([make_sample(t) for t in ("ok", "bad", "ok", "ok")])
    assert [r.value for r in results] == [None, None, 1.0, 1.0]
    said = "sample 'p0@0#0': the function returned 3 scores for 2 samples"
    assert results[0].error == results[1].error == said, "all samples here have one id"


async def test_every_way_to_fail_marks_that_sample_and_no_other(function, make_sample):
    """In order: hang, segfault, exit, exception, NaN, text, None, a printing function, an object that cannot travel."""
    reward = function(
        "import ctypes, os, sys, time\n"
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str == 'hang': time.sleep(1000)\n"
        "    if solution_str == 'segfault': ctypes.string_at(0)\n"
        "    if solution_str == 'exit': os._exit(3)\n"
        "    if solution_str == 'sys.exit': sys.exit('bye')\n"
        "    if solution_str == 'raise': raise KeyError('answer')\n"
        "    if solution_str == 'nan': return float('nan')\n"
        "    if solution_str == 'print': print('x' * 100000); os.write(1, b'raw'); return 0.25\n"
        "    return {'text': 'no', 'none': None, 'object': lambda: 1}.get(solution_str, 1.0)\n",
        timeout_s=1.0,
    )
    kinds = ["hang", "segfault", "exit", "sys.exit", "raise", "nan", "text", "none", "object", "print"]
    samples = [make_sample(text) for kind in kinds for text in ("fine", kind)] + [make_sample("fine")]
    results = await reward.score(samples)
    assert [r.value for r in results[::2]] == [1.0] * (len(kinds) + 1)
    by_kind = dict(zip(kinds, results[1::2], strict=True))
    assert by_kind.pop("print").value == 0.25
    expected = {
        "hang": "timed out after 1 s",
        "segfault": "signal SIGSEGV",
        "exit": "exit status 3",
        "sys.exit": "SystemExit: bye",
        "raise": "KeyError: 'answer'",
        "nan": "returned nan",
        "text": "returned 'no' (a str)",
        "none": "no score",
        "object": "<lambda>",
    }
    for kind, message in expected.items():
        assert by_kind[kind].value is None
        assert message in by_kind[kind].error
    assert "rewards.py:7 in f" in by_kind["raise"].error


async def test_the_score_of_what_cannot_be_judged(function, make_sample):
    source = (
        "import time\n"
        "def f(completions, **_):\n"
        "    if completions[0] == 'slow': time.sleep(1000)\n"
        "    if completions[0] == 'large': bytearray(1 << 40)\n"
        "    return [1.0]\n"
    )
    samples = [make_sample(text) for text in ("slow", "large", "fine")]
    reward = function(source, timeout_s=0.3, ungraded_score=-1.0)
    assert [(r.value, r.components) for r in await reward.score(samples)] == [
        (-1.0, {"ungraded": 1.0}),
        (-1.0, {"ungraded": 1.0}),
        (1.0, {}),
    ]
    results = await function(source, timeout_s=0.3).score(samples)
    assert [r.value for r in results] == [None, None, 1.0]
    with pytest.raises(ValidationError, match="Set batch_size to 1"):
        FunctionOptions(path="a:f", batch_size=2, ungraded_score=0.0)


async def test_a_column_that_cannot_be_pickled_marks_its_sample(function, make_sample):
    reward = function("def f(prompts, completions, **columns):\n    return [1.0]\n")
    bad, good = await reward.score([make_sample("a", handle=lambda: 1), make_sample("a", handle=1)])
    assert "cannot be sent to a worker process" in bad.error
    assert good.value == 1.0


async def test_a_missing_column_is_named(function, make_sample):
    reward = function("def f(completions, answer):\n    return [1.0]\n")
    (result,) = await reward.score([make_sample("a", level=1)])
    assert "needs the columns ['answer']; the rows have" in result.error


async def test_a_file_may_import_its_neighbours(use, write_module, make_sample):
    write_module("user/neighbour_scores.py", "BEST = 7.0\n")
    path = write_module(
        "user/rewards.py", "from neighbour_scores import BEST\ndef f(completions, **_):\n    return [BEST]\n"
    )
    reward = use(FunctionReward, FunctionOptions(path=f"{path}:f", num_workers=1))
    assert (await reward.score([make_sample("a")]))[0].value == 7.0


async def test_paths_are_relative_to_the_working_directory(use, write_module, make_sample, monkeypatch, tmp_path):
    write_module("user/rewards.py", "def f(completions, **_):\n    return [1.0]\n")
    monkeypatch.chdir(tmp_path)
    for path in ("user/rewards.py:f", "user.rewards:f"):
        reward = use(FunctionReward, FunctionOptions(path=path, num_workers=1))
        assert (await reward.score([make_sample("a")]))[0].value == 1.0


def test_what_cannot_be_set_up_says_why(function):
    with pytest.raises(ConfigError, match=r"reward 'function' of role 'reward': .*has no function 'g'; it has: f"):
        function("def f(completions): ...\n", name="g")
    with pytest.raises(ConfigError, match=r"cannot tell how to call a function of \(x\)"):
        function("def f(x): ...\n")
    with pytest.raises(BackendError, match=r"ModuleNotFoundError: No module named 'absent_engine'"):
        function("import absent_engine\ndef f(completions): ...\n")
    with pytest.raises(BackendError, match=r"died while starting \(exit status 9\)"):
        function("import os\nos._exit(9)\n")


@pytest.mark.parametrize("path", ["f", "module.f", "module:", "module:a-b", ":f"])
def test_a_path_names_module_and_function(path):
    with pytest.raises(ValidationError, match=r"must be package.module:function or path/to/file.py:function"):
        FunctionOptions(path=path)
