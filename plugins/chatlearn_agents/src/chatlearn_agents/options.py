"""Options of the environments and of the tools. Imports nothing heavy."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from chatlearn_agents.tool_choice import ToolChoice

_STRICT = ConfigDict(extra="forbid", frozen=True)


class FunctionToolOptions(BaseModel):
    """A Python function; its signature and docstring make the schema."""

    model_config = _STRICT

    path: str = Field(description="package.module:function, sync or async.")
    name: str | None = Field(None, description="Name for the model; by default the function's.")
    description: str | None = Field(None, description="For the model; by default the docstring's.")
    parameters: dict[str, Any] | None = Field(
        None, description="JSON Schema of the arguments, an object; by default from signature and docstring."
    )


class CalculatorOptions(BaseModel):
    """A calculator of numbers, operators and functions such as ``sqrt``."""

    model_config = _STRICT

    name: str = "calculator"


class PythonOptions(BaseModel):
    """A Python interpreter in a sandbox; every call is a program of its own."""

    model_config = _STRICT

    name: str = "python"
    timeout_s: float = Field(10.0, gt=0, le=3600, description="Time limit of a program, seconds.")
    memory_mb: int = Field(
        512,
        ge=32,
        le=1 << 20,
        description="Address space of each process of a program, and memory of all, MiB.",
    )
    max_processes: int = Field(16, ge=1, le=4096, description="Processes and threads that a program may have at once.")
    disk_mb: int = Field(32, ge=1, le=1 << 20, description="Total size of the files that a program may write, MiB.")
    output_kb: int = Field(256, ge=1, le=1 << 16, description="Largest standard output of a program, KiB.")
    isolation: Literal["namespaces", "none"] = Field(
        "namespaces",
        description="namespaces: no network, and only the program's own files and processes; an error where the kernel "
        "forbids namespaces. none: only limits on time, memory and output, for trusted code.",
    )


class SearchOptions(BaseModel):
    """Search over the passages of a local file, ranked by BM25."""

    model_config = _STRICT

    path: str = Field(description="JSON Lines file; each line is an object with the text of a passage.")
    name: str = "search"
    description: str = "Searches a collection of texts and returns the passages that match best."
    text: str = Field("text", description="Key of the passage's text.")
    title: str | None = Field("title", description="Key of its title, which is searched, too; rows may lack it.")
    results: int = Field(3, ge=1, le=100, description="Number of passages returned.")
    passage_chars: int = Field(1000, ge=1, description="Characters of a passage that are shown.")


class McpOptions(BaseModel):
    """The tools of a server that speaks the Model Context Protocol on its standard input and output."""

    model_config = _STRICT

    command: tuple[str, ...] = Field(min_length=1, description="The server's program and its arguments.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables for the server.")
    tools: tuple[str, ...] | None = Field(None, description="Names of the tools to offer; by default all.")
    prefix: str = Field("", description="Put before the tools' names, to tell servers apart.")
    start_timeout_s: float = Field(30.0, gt=0, description="Time limit for the server to start and list its tools.")
    max_restarts: int = Field(3, ge=0, description="How often a server that has ended is started again in a run.")


class ToolsOptions(BaseModel):
    """The tools, and the limits of their calls."""

    model_config = _STRICT

    tools: tuple[ToolChoice, ...] = Field(
        min_length=1,
        description="Each an object with the kind of a tool (chatlearn plugins list) and the options of that tool. A "
        "text is a kind without options, or the path of a function (package.module:function).",
    )
    tool_calls: Literal["auto", "hermes", "json", "glm", "qwen_xml", "deepseek", "harmony"] = Field(
        "auto",
        description="How the model writes tool calls. hermes: <tool_call>{...}</tool_call> (Qwen). json: the whole "
        "turn is an object with name and parameters (Llama 3). glm, qwen_xml, deepseek, harmony: as GLM-4.5, Qwen3.5, "
        "DeepSeek-V3 and gpt-oss write them. auto: as the chat template writes a call.",
    )
    timeout_s: float = Field(30.0, gt=0, le=86400, description="Time limit of one call, seconds.")
    retries: int = Field(0, ge=0, le=10, description="How often a call that raised or timed out is repeated.")
    max_result_chars: int = Field(
        8000, ge=16, description="Characters of a result that the model sees; a cut result says so."
    )
    max_calls_per_turn: int = Field(16, ge=1, description="Calls of one turn that are run; the others are refused.")
    max_concurrent_calls: int = Field(16, ge=1, description="Calls that run at once in this environment.")


class GameOptions(BaseModel):
    """A game with the interface of Gymnasium or OpenEnv, and the texts that stand for observations and actions."""

    model_config = _STRICT

    api: Literal["gymnasium", "openenv"] = Field(
        "gymnasium",
        description="gymnasium: reset(seed=) and step(action) return tuples. openenv: they return a result with "
        "observation, reward and done, and may be coroutines.",
    )
    make: str = Field(
        description="package.module:function, which returns a new game. With api=gymnasium also an id of "
        "gymnasium.make, such as FrozenLake-v1.",
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of make.")
    observation: str | None = Field(
        None,
        description="package.module:function, which returns the text of an observation. By default a text as it is, "
        "a picture in letters if the game renders one (render_mode: ansi), otherwise str().",
    )
    action: str = Field(
        "auto",
        description="How a turn becomes an action. text: as it is. number: its last integer. name: the last of actions "
        "that it mentions. package.module:function: what that returns for the text; a ValueError makes the turn "
        "invalid. auto: name if there are actions, number for a discrete space, otherwise text.",
    )
    actions: tuple[str, ...] = Field((), description="Names of the actions 0, 1, ...")
    invalid_message: str = Field(
        "That is no action. Try again.", min_length=1, description="The user's message after an invalid turn."
    )
    invalid_reward: float = Field(0.0, allow_inf_nan=False, description="Reward of an invalid turn.")
    rewards: Literal["sum", "turns"] = Field(
        "sum",
        description="sum: the rollout's reward is the sum of the game's. turns: each turn has the game's reward "
        "for it, as the reward of a step, and the rollout none of its own.",
    )
    max_steps: int = Field(100, ge=1, description="Number of turns, after which the rollout is truncated.")
    max_observation_chars: int = Field(
        8000, ge=16, description="Characters of an observation that the policy sees; a cut one says so."
    )
    call_timeout_s: float = Field(30.0, gt=0, description="Time limit of reset and of each step, seconds.")


class CorrectionOptions(BaseModel):
    """The check of an answer, the message after a wrong one, and the reward."""

    model_config = _STRICT

    check: str = Field(
        "last_number",
        description="last_number: the last number of the turn equals the ground truth. Otherwise a function, "
        "package.module:function, of the turn's text and the ground truth, which returns whether the turn is right.",
    )
    message: str = Field(
        "That is wrong. Try again.", min_length=1, description="The user's message after a wrong answer."
    )
    max_attempts: int = Field(3, ge=1, description="Number of turns that the policy has.")
    correct: float = Field(1.0, allow_inf_nan=False, description="Reward if the first attempt is right.")
    discount: float = Field(
        0.8, ge=0, le=1, description="Each further attempt multiplies the reward of a right answer by this."
    )
    incorrect: float = Field(0.0, allow_inf_nan=False, description="Reward if no attempt is right.")
