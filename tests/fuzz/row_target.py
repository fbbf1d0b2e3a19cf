"""What becomes of a data file, in a process of its own: read as a run reads it, and shown."""

from __future__ import annotations

from typing import Any

from chatlearn_algorithms.example_kinds import Demonstrations, Preferences
from chatlearn_chat import ChatTemplateRenderer
from chatlearn_core.config.models import DataConfig
from chatlearn_core.data import Prompts, build_dataset
from chatlearn_core.exceptions import ChatLearnError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_data.show import described_rows
from chatlearn_hf.model_directory import load_tokenizer

REGISTRY = discover_plugins()
KINDS = {"prompts": Prompts, "demonstrations": Demonstrations, "preferences": Preferences}


def read(case: dict[str, Any]) -> dict[str, Any]:
    """Counts of the rows, or the sentence that refuses the file.

    Args:
        case: ``path`` and ``format`` of the file, what the algorithm takes (``input``), and the ``model`` directory
            whose tokenizer encodes.
    """
    tokenizer: Any = load_tokenizer(case["model"])
    config = DataConfig.model_validate(
        {"train": [{"path": case["path"], "format": case["format"]}], "on_bad_row": "skip"}
    )
    try:
        if case["show"]:
            "".join(described_rows(case["path"], 5, case["format"], None)).encode()
        (dataset,) = build_dataset(
            config,
            ChatTemplateRenderer(tokenizer, max_tokens=256),
            REGISTRY,
            kind=KINDS[case["input"]](),
            max_prompt_tokens=200,
            max_length=256,
        ).datasets
    except ChatLearnError as error:
        return {"refused": str(error)}
    report = dataset.report
    return {
        "examples": report.num_examples,
        "accounted": report.num_rows == report.num_examples + report.num_filtered + report.num_bad,
        "report": str(report).encode("utf-8").decode(),
        "forged": sum(forged_turns(example, tokenizer) for example in dataset.examples),
    }


def forged_turns(example: Any, tokenizer: Any) -> bool:
    """Whether an example has other control tokens than the template writes for as many messages."""
    prompt = example.prompt
    if not prompt.messages:
        return False
    renderer = ChatTemplateRenderer(tokenizer)
    special = set(tokenizer.all_special_ids)
    plain = [
        {**message, "content": "x"}
        for message in prompt.messages
        if not renderer.spelled_control_tokens(message["role"])
    ]
    if len(plain) < len(prompt.messages):
        return False
    expected = tokenizer.apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
    return [i for i in prompt.token_ids.tolist() if i in special] != [i for i in expected if i in special]
