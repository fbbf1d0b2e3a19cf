"""Registers dataset formats, row readers, the default sampler, and the command ``chatlearn data``."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import CliCommandSpec, DatasetSpec, SamplerSpec

_OPTIONS = "chatlearn_data.options:"
_FORMATS = "chatlearn_data.formats."
_READERS = "chatlearn_data.readers."


@hookimpl
def chatlearn_datasets() -> Iterable[DatasetSpec]:
    """Register formats by columns or name, and readers of files and hub datasets."""
    return [
        DatasetSpec(
            name="verifiable",
            summary="prompt (chat) and reward_model.ground_truth; what `chatlearn data prepare` writes.",
            factory=_FORMATS + "verifiable:VerifiableFormat",
            options=_OPTIONS + "AnswerOptions",
            columns=frozenset({"prompt", "reward_model"}),
        ),
        DatasetSpec(
            name="prompt",
            summary="prompt (text or chat) and any columns; the answer in answer, solution, ground_truth or label.",
            factory=_FORMATS + "prompt:PromptFormat",
            options=_OPTIONS + "AnswerOptions",
            columns=frozenset({"prompt"}),
        ),
        DatasetSpec(
            name="keys",
            summary="Columns named in options: input_key, label_key, completion_key, ...",
            factory=_FORMATS + "keys:KeysFormat",
            options=_OPTIONS + "KeysOptions",
        ),
        DatasetSpec(
            name="sft",
            summary="prompt with completion or response, to imitate.",
            factory=_FORMATS + "sft:SftFormat",
            options=_OPTIONS + "NoOptions",
            columns=frozenset({"prompt", "completion"}),
        ),
        DatasetSpec(
            name="messages",
            summary="messages whose last turn is the assistant's; the assistant's turns are imitated.",
            factory=_FORMATS + "sft:MessagesFormat",
            options=_OPTIONS + "MessagesOptions",
            columns=frozenset({"messages"}),
        ),
        DatasetSpec(
            name="preference",
            summary="chosen and rejected completions of a prompt.",
            factory=_FORMATS + "preference:PreferenceFormat",
            options=_OPTIONS + "PreferenceOptions",
            columns=frozenset({"chosen", "rejected"}),
        ),
        DatasetSpec(
            name="ranked",
            summary="prompt with a list of completions and their scores, ranks or labels.",
            factory=_FORMATS + "preference:RankedFormat",
            options=_OPTIONS + "NoOptions",
            columns=frozenset({"prompt", "completions"}),
        ),
        DatasetSpec(
            name="labelled",
            summary="prompt with a completion and a label, true for a good one; only by name.",
            factory=_FORMATS + "preference:LabelledFormat",
            options=_OPTIONS + "NoOptions",
        ),
        DatasetSpec(
            name="gsm8k",
            summary="GSM8K as published: question, answer ending in `#### NUMBER`.",
            factory=_FORMATS + "gsm8k:Gsm8kFormat",
            options=_OPTIONS + "InstructionOptions",
            columns=frozenset({"question", "answer"}),
        ),
        DatasetSpec(
            name="math",
            summary="MATH as published: problem, solution with \\boxed{}, optionally answer.",
            factory=_FORMATS + "math:MathFormat",
            options=_OPTIONS + "InstructionOptions",
            columns=frozenset({"problem", "solution"}),
        ),
        *_text_readers(),
        DatasetSpec(
            name="parquet",
            summary="Reads rows of .parquet files.",
            factory=_READERS + "parquet:ParquetReader",
            options=_OPTIONS + "NoOptions",
            reads=frozenset({".parquet"}),
        ),
        DatasetSpec(
            name="hub",
            summary="Reads rows of hub datasets by id, from the network or a cache.",
            factory=_READERS + "hub:HubReader",
            options=_OPTIONS + "NoOptions",
            reads=frozenset({"hub"}),
        ),
    ]


def _text_readers() -> Iterable[DatasetSpec]:
    readers = {".jsonl": "JsonLinesReader", ".json": "JsonReader", ".csv": "CsvReader"}
    return [
        DatasetSpec(
            name=suffix[1:],
            summary=f"Reads rows of {suffix} files.",
            factory=f"{_READERS}text:{reader}",
            options=_OPTIONS + "NoOptions",
            reads=frozenset({suffix}),
        )
        for suffix, reader in readers.items()
    ]


@hookimpl
def chatlearn_samplers() -> Iterable[SamplerSpec]:
    """Register the default sampler."""
    return [
        SamplerSpec(
            name="shuffled",
            summary="Every dataset epoch by epoch, mixed by weight, each epoch in a new random order.",
            factory="chatlearn_data.shuffled_sampler:shuffled_sampler",
            options=_OPTIONS + "ShuffledOptions",
        )
    ]


@hookimpl
def chatlearn_cli_commands() -> Iterable[CliCommandSpec]:
    """Register ``chatlearn data prepare`` and ``chatlearn data show``."""
    return [CliCommandSpec(name="data", app="chatlearn_data.cli:app", help="Prepare and show datasets.")]
