"""The agent of ``benchmarks/calculator_agent.py``, written with the OpenAI Agents SDK, against the gateway."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[3] / "benchmarks" / "calculator_agent.py"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 * 3"}}\n</tool_call>'


@pytest.fixture(scope="module")
def agent() -> Any:
    spec = importlib.util.spec_from_file_location("calculator_agent", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def solved(agent: Any, served: Any) -> Any:
    example = {"messages": [{"role": "user", "content": "what is 17 * 3?"}], "ground_truth": "51"}
    return await agent.solve(f"{served.url}/v1", served.key, "policy", example)


async def test_an_unmodified_agent_calls_its_tool_and_is_recorded(agent: Any, serve: Any, tokenizer: Any) -> None:
    served = serve(CALL, "it is 51")
    assert await solved(agent, served) == {"reward": 1.0, "accuracy": 1.0, "called": 1.0}
    [sample] = served.session.samples()
    assert served.session.counts.branches == served.session.counts.refused == 0
    assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == f"{CALL}<|im_end|>it is 51<|im_end|>"
    behind = tokenizer.decode(sample.token_ids[sample.turns[0].stop : sample.turns[1].start])
    assert behind == "\n<|im_start|>tool\n51<|im_end|>\n<|im_start|>assistant\n", "the tool's result"
    first, second = served.generator.asked
    assert second.prompt_ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()
    assert agent.tool_schema()["function"]["name"] in tokenizer.decode(first.prompt_ids)


async def test_what_the_agent_does_not_manage(agent: Any, serve: Any) -> None:
    assert (await solved(agent, serve("it is 50")))["reward"] == 0.0
    unknown = CALL.replace("calculator", "abacus")
    assert await solved(agent, serve(unknown)) == {"reward": 0.0, "accuracy": 0.0, "called": 0.0}
    endless = serve(*[CALL] * 9)
    assert (await solved(agent, endless))["reward"] == 0.0
    assert endless.session.counts.requests == agent.MAX_TURNS
