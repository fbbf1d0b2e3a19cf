"""The environment runs agents: functions, coroutine functions and programs, also those that misbehave."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from chatlearn_core.exceptions import BackendError, ConfigError, TurnLimitError
from chatlearn_core.protocols import RoleContext, RolloutContext, RolloutOrder
from chatlearn_core.types import Prompt, Rollout, SamplingParams
from chatlearn_gateway.environment import AgentEnvironment
from chatlearn_gateway.options import AgentOptions
from chatlearn_hf.tiny import build_tiny_tokenizer
from chatlearn_testing.fakes.scripted import Scripted

AGENTS = """
import time
import openai

RELEASED = []

def ask(base_url, api_key, messages):
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=20) as client:
        return client.chat.completions.create(model="policy", messages=messages).choices[0].message.content

def judged(base_url, api_key, example):
    answer = ask(base_url, api_key, example["messages"])
    return {"reward": float(example["ground_truth"] in answer), "length": len(answer)}

async def asynchronous(*, base_url, api_key, model, **others):
    assert set(others) == {"example"}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(model=model, messages=others["example"]["messages"])
    return len(answer.choices[0].message.content)

def asks_on_and_on(base_url, api_key, example):
    messages = list(example["messages"])
    while True:
        answer = ask(base_url, api_key, messages)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]

def raises(api_key):
    raise ValueError("no such tool")

def silent():
    return 1.0

def text(base_url, api_key, example):
    return ask(base_url, api_key, example["messages"])

def hangs(base_url, api_key):
    time.sleep(1.5)
    try:
        ask(base_url, api_key, [{"role": "user", "content": "x"}])
    except openai.PermissionDeniedError as error:
        RELEASED.append(error.body["code"])

async def hangs_asynchronously():
    import asyncio
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        RELEASED.append("cancelled")
        raise

def asks_a_judge(base_url, api_key, model, example):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    assert [one.id for one in client.models.list()] == ["policy", "judge"]
    mine = client.chat.completions.create(model=model, messages=example["messages"]).choices[0].message.content
    judged = client.chat.completions.create(
        model="judge", messages=[{"role": "user", "content": mine}], temperature=0.0, stop="!", stream=False
    )
    assert judged.model == "judge"
    return {"reward": float(judged.choices[0].message.content)}

def needs_more(base_url, api_key, temperature):
    pass
"""
PROGRAM = """
import json, os, sys, urllib.request
example = json.load(sys.stdin)
body = json.dumps({"model": os.environ["CHATLEARN_MODEL"], "messages": example["messages"], "max_tokens": 50})
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body.encode(),
                                 {"x-api-key": os.environ["ANTHROPIC_API_KEY"]})
print(json.load(urllib.request.urlopen(request))["content"][0]["text"])
print(json.dumps({"reward": 0.25}))
"""


@pytest.fixture(autouse=True)
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "some_agents.py").write_text(AGENTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("some_agents", None)


@pytest.fixture
def played(tokenizer: Any, scripted: Any) -> Iterator[Callable[..., Any]]:
    """``await played(options, *texts, timeout_s=, max_turns=)``: a rollout of one agent."""
    made: list[AgentEnvironment] = []
    before = set(threading.enumerate())  # another module's server may still run

    async def play(
        options: dict[str, Any],
        *texts: str,
        timeout_s: float = 30.0,
        max_turns: int | None = None,
        longest: int = 400,
        rendered: str = "",
    ) -> Rollout:
        environment = AgentEnvironment(AgentOptions(**options), RoleContext("agent"))
        made.append(environment)
        environment.setup()
        messages = ({"role": "user", "content": "what is 1 + 1?"},)
        prompt = Prompt("p", np.array([5], np.int64), "what is 1 + 1?", ground_truth="2", messages=messages)
        order = RolloutOrder("p@0#0", "p@0", prompt, SamplingParams(100), 7, longest, timeout_s, max_turns)
        context = RolloutContext(order, tokenizer, scripted(*texts))
        async with asyncio.timeout(timeout_s):
            return await environment.rollout(prompt, context)

    yield play
    for environment in made:
        environment.close()
        environment.close()
    assert not any(thread.name == "gateway" for thread in set(threading.enumerate()) - before)


def agent(name: str, **options: Any) -> dict[str, Any]:
    return {"function": f"some_agents:{name}", "reward": "agent", **options}


async def test_a_function_is_the_agent_and_gives_the_reward(played: Any) -> None:
    made = await played(agent("judged"), "it is 2")
    assert (made.status, made.reward.value, made.reward.components) == ("finished", 1.0, {"length": 7.0})
    [sample] = made.samples
    assert sample.loss_mask.sum() == 8
    judged_by_flow = await played(agent("judged", reward="flow"), "it is 2")
    assert judged_by_flow.reward is None


async def test_another_generator_is_a_model_whose_turns_are_not_recorded(tokenizer: Any, scripted: Any) -> None:
    other = build_tiny_tokenizer(300)
    judge, policy = Scripted(other, ["0.5"]), scripted("It is 2.")
    handles = {
        "policy": SimpleNamespace(tokenizer=tokenizer, max_length=400),
        "judge": SimpleNamespace(tokenizer=other, max_length=300),
    }
    environment = AgentEnvironment(AgentOptions(**agent("asks_a_judge")), RoleContext("agent", handles=handles))
    environment.setup()

    async def generate(handle: str, request: Any, on_tokens: Any = None, /) -> Any:
        return await {"policy": policy, "judge": judge}[handle](handle, request)

    messages = ({"role": "user", "content": "what is 1 + 1?"},)
    prompt = Prompt("p", np.array([5], np.int64), "what is 1 + 1?", messages=messages)
    order = RolloutOrder("p@0#0", "p@0", prompt, SamplingParams(100), 7, 400, 30.0, 1)
    try:
        made = await environment.rollout(prompt, RolloutContext(order, tokenizer, generate))
    finally:
        environment.close()
    assert made.reward is not None
    assert made.reward.value == 0.5
    [sample] = made.samples
    assert tokenizer.decode(sample.token_ids[sample.loss_mask], skip_special_tokens=True) == "It is 2."
    assert sample.sequence_data["environment/other_models"] == 1.0
    [asked] = judge.asked
    text = "<|im_start|>user\nIt is 2.<|im_end|>\n<|im_start|>assistant\n"
    assert asked.prompt_ids.tolist() == other.encode(text, add_special_tokens=False), "by its own tokenizer"
    assert (asked.sampling.temperature, asked.sampling.stop) == (0.0, ("!",)), "as the agent asks"
    named = AgentEnvironment(AgentOptions(**agent("asks_a_judge", model="judge")), RoleContext("x", handles=handles))
    with pytest.raises(ConfigError, match="uses has a generator of this name, too"):
        named.setup()


async def test_a_plain_text_is_rendered_once(played: Any, tokenizer: Any) -> None:
    [sample] = (await played(agent("judged"), "it is 2")).samples
    prompt = tokenizer.decode(sample.token_ids[: sample.num_prompt_tokens])
    [again] = (await played(agent("judged"), "it is 2", rendered=prompt)).samples
    assert again.token_ids.tolist() == sample.token_ids.tolist()


async def test_a_coroutine_function_is_the_agent(played: Any) -> None:
    assert (await played(agent("asynchronous"), "it is 2")).reward.value == 7.0


async def test_a_program_is_the_agent(played: Any) -> None:
    made = await played({"command": [sys.executable, "-c", PROGRAM], "reward": "agent"}, "it is 2")
    assert made.reward.value == 0.25
    assert len(made.samples[0].turns) == 1
    with pytest.raises(BackendError, match=r"ended with code 1: Traceback"):
        await played({"command": [sys.executable, "-c", "{}['x']"]})
    with pytest.raises(BackendError, match=r"does not start \(options.command\)"):
        await played({"command": ["/no/such/program"]})


async def test_a_program_that_hangs_is_killed(played: Any, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid}; wait"
    with pytest.raises(TimeoutError):
        await played({"command": ["sh", "-c", script]}, timeout_s=1.0)
    child = Path(f"/proc/{pid.read_text().strip()}/stat")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the program's child survived"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("name", "texts", "words"),
    [
        ("raises", (), "agent some_agents:raises raised ValueError: no such tool"),
        ("silent", (), "the agent ended without a turn of the model"),
        ("text", ("it is 2",), "the agent returned 'it is 2'; with options.reward=agent it returns a finite number"),
    ],
)
async def test_an_agent_that_breaks_the_rules_excludes_its_rollout(
    name: str, texts: tuple[str, ...], words: str, played: Any
) -> None:
    with pytest.raises(BackendError, match=words):
        await played(agent(name), *texts)


async def test_limits_truncate_a_rollout(played: Any) -> None:
    texts = ["more"] * 9
    turns = await played(agent("asks_on_and_on", reward="flow"), *texts, max_turns=3)
    assert (turns.status, len(turns.samples[0].turns)) == ("truncated", 3)
    context = await played(agent("asks_on_and_on", truncated_reward=-1.0), *texts, longest=120)
    assert (context.status, context.reward.value) == ("truncated", -1.0)
    assert 60 < len(context.samples[0].token_ids) <= 120
    with pytest.raises(TurnLimitError, match=r"may have 3 \(max_turns"):
        await played(agent("asks_on_and_on"), *texts, max_turns=3)


async def test_an_agent_without_time_loses_its_key(played: Any) -> None:
    with pytest.raises(TimeoutError):
        await played(agent("hangs"), timeout_s=0.5)
    with pytest.raises(TimeoutError):
        await played(agent("hangs_asynchronously"), timeout_s=0.5)
    released = sys.modules["some_agents"].RELEASED
    deadline = time.monotonic() + 20
    while len(released) < 2:
        assert time.monotonic() < deadline, released
        await asyncio.sleep(0.02)
    assert sorted(released) == ["cancelled", "rollout_over"]


async def test_agents_that_cannot_be_called_are_refused_before_the_first_rollout(played: Any) -> None:
    for path, words in [
        ("some_agents:nothing", "has no attribute 'nothing'"),
        ("no_such_module:x", "cannot be imported"),
        ("some_agents:RELEASED", "is a list, not a function"),
        ("some_agents:needs_more", "requires the parameter 'temperature'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            await played({"function": path})
    taken = AgentEnvironment(AgentOptions(function="some_agents:silent"), RoleContext("agent"))
    taken.setup()
    port = int(taken._gateway.url.rpartition(":")[2])
    with pytest.raises(BackendError, match=r"cannot listen at 127.0.0.1:\d+ \(options.host, options.port\)"):
        await played({"function": "some_agents:silent", "port": port})
    taken.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "set exactly one of function"),
        ({"function": "a:b", "command": ["c"]}, "set exactly one of function"),
        ({"command": []}, "command is empty"),
        ({"function": "a:b", "truncated_reward": 1.0}, "is for reward: agent"),
        ({"function": "a:b", "reward": "agent", "truncated_reward": float("nan")}, "must be a finite number"),
    ],
)
def test_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AgentOptions(**options)
