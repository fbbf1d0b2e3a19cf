"""An agent of the OpenAI Agents SDK (``openai-agents``) with a calculator, as ``agent_learning.py`` trains it.

It knows nothing of ChatLearn: the address, the key and the model's name are those of any OpenAI-compatible provider.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agents import Agent, AgentsException, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI, OpenAIError

from chatlearn_agents.calculator import calculate
from chatlearn_agents.correction_environment import last_number_equals

MAX_TURNS = 3
set_tracing_disabled(True)


@function_tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return calculate(expression)


def tool_schema() -> dict[str, Any]:
    """The calculator as the agent's requests describe it."""
    function = {"name": calculator.name, "description": calculator.description}
    return {"type": "function", "function": {**function, "parameters": calculator.params_json_schema}}


async def solve(base_url: str, api_key: str, model: str, example: Mapping[str, Any]) -> dict[str, float]:
    """Answer one question; ``reward`` and ``accuracy`` are 1 if the last number of the answer is right.

    An agent that ends with an error of its framework (too many turns, a tool that does not exist) has not answered.
    """
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        agent = Agent(
            name="calculator",
            tools=[calculator],
            model=OpenAIChatCompletionsModel(model=model, openai_client=client),
        )
        try:
            result = await Runner.run(agent, example["messages"][-1]["content"], max_turns=MAX_TURNS)
        except (AgentsException, OpenAIError):
            return {"reward": 0.0, "accuracy": 0.0, "called": 0.0}
    called = any(item.type == "tool_call_item" for item in result.new_items)
    right = float(last_number_equals(str(result.final_output), example["ground_truth"]))
    return {"reward": right, "accuracy": right, "called": float(called)}
