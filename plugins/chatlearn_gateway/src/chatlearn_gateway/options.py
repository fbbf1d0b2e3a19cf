"""Options of the environment ``agent``. Imports pydantic only."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class AgentOptions(BaseModel):
    """The agent, the source of the reward, and the address of the server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    function: str | None = Field(
        None,
        description="The agent, package.module:function, sync or async. It is called with those of base_url, api_key, "
        "model and example that it has parameters for. Exactly one of function, command and verifiers is set.",
    )
    command: tuple[str, ...] | None = Field(
        None,
        description="The agent as a program and its arguments. Its environment has OPENAI_BASE_URL, OPENAI_API_KEY, "
        "ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and CHATLEARN_MODEL; standard input is the example as JSON.",
    )
    verifiers: str | None = Field(
        None,
        description="An environment of the library verifiers: an id of verifiers.load_environment, or "
        "package.module:function, which returns one. Its rubric gives the reward with reward: agent.",
    )
    verifiers_arguments: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the verifiers environment."
    )
    reward: Literal["flow", "agent"] = Field(
        "flow",
        description="flow: a reward role judges the rollout. agent: the function returns it, or the program prints it "
        "as the last line of its output: a number, or an object with 'reward' and further numbers.",
    )
    truncated_reward: float | None = Field(
        None,
        description="With reward: agent, the reward of a rollout whose agent raised after a request was refused "
        "because of the context's length or the number of turns. Without it, such a rollout is excluded.",
    )
    tool_calls: Literal["auto", "hermes", "json", "glm", "qwen_xml", "deepseek", "harmony", "none"] = Field(
        "auto",
        description="How the model writes tool calls. hermes: <tool_call>{...}</tool_call> (Qwen). json: the whole "
        "turn is an object with name and parameters (Llama 3). glm, qwen_xml, deepseek, harmony: as GLM-4.5, Qwen3.5, "
        "DeepSeek-V3 and gpt-oss write them. none: never. auto: as the chat template writes a call.",
    )
    request_sampling: Literal["refuse", "run"] = Field(
        "refuse",
        description="A request whose temperature, top_p, top_k, min_p or seed is not the run's. refuse: it gets an "
        "error. run: it is sampled with the run's, and counted (environment/overridden_sampling).",
    )
    model: str = Field("policy", min_length=1, description="Name under which the server offers the generator.")
    host: str = Field("127.0.0.1", description="Address at which the server listens. Other than loopback: unencrypted.")
    port: int = Field(0, ge=0, le=65535, description="Port of the server; 0: one that is free.")
    max_request_bytes: int = Field(16 << 20, ge=1024, description="Longest request body, bytes.")

    @field_validator("truncated_reward")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"truncated_reward is {value}; it must be a finite number")
        return value

    @model_validator(mode="after")
    def _one_agent(self) -> AgentOptions:
        if [self.function, self.command, self.verifiers].count(None) != 2:
            raise ValueError(
                "set exactly one of function (package.module:function), command (a list of texts) and verifiers "
                "(the id of an environment)"
            )
        if self.verifiers_arguments and self.verifiers is None:
            raise ValueError("verifiers_arguments are for verifiers, which is not set")
        if self.command is not None and not self.command:
            raise ValueError("command is empty; its first entry is the program")
        if self.truncated_reward is not None and self.reward != "agent":
            raise ValueError("truncated_reward is for reward: agent; a reward role judges truncated rollouts itself")
        return self
