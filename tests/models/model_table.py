"""What the trainer and the generator make of every causal model type of the installed transformers, as a table.

Each type is built tiny, saved, and given to the trainer as a user would; what it computes is then compared with a plain
forward pass of each sequence alone, in float32, with sequences longer than every window and context.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from chatlearn_core.exceptions import ModelError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.types import OutputRequest, TrainBatch, cumulative_lengths
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_fsdp.trainer import FSDPTrainer
from chatlearn_hf.plain_forward import load_plain_model
from chatlearn_hf.tiny_architectures import DYNAMIC_ROPE, LONG_ROPE, VOCAB_SIZE, build_tiny, causal_model_types
from chatlearn_transformers.served_models import check_served_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- table of model types: begin -->\n", "<!-- table of model types: end -->\n"
SETTINGS: dict[str, dict[str, Any]] = {
    "varlen": {"attention": "varlen"},
    "sdpa": {"attention": "sdpa"},
    "eager": {"attention": "eager"},
    "padded": {"sequences": "padded"},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, dynamic RoPE": ("llama", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 12}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONG_ROPE, "sliding_window": None}),
    "phimoe, longrope": ("phimoe", {"rope_parameters": LONG_ROPE}),
    "qwen2, windows": ("qwen2", {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 6}),
}
"""Settings that change how a type computes and are not its default."""
LENGTHS = (23, 4, 17, 1, 30, 9)
TOLERANCE = 1e-3
"""Nats, of any token."""
NOT_TRIED = "–"


@dataclass(slots=True)
class Row:
    """One line of the table."""

    name: str
    cells: dict[str, str] = field(default_factory=dict)
    """By setting of the trainer, and ``generator``: ``packed``, ``padded``, ``right``, ``refused`` or ``wrong``."""
    reason: str = ""
    """Why it is not packed, not served, or could not be built."""

    @property
    def is_wrong(self) -> bool:
        return "wrong" in self.cells.values()


def names() -> list[str]:
    """Every line of the table."""
    return sorted([*causal_model_types(), *VARIANTS])


def row_of(name: str, directory: Path) -> Row:
    """Build, train-side compute and serve one type."""
    row = Row(name)
    model_type, fields = VARIANTS.get(name, (name, {}))
    # Any of the thousands of configurations may fail in its own way; what was raised is in the table.
    try:
        build_tiny(model_type, **fields).save_pretrained(directory)
        plain = load_plain_model(directory)
        expected = _alone(plain, _batch())
    except Exception as error:
        row.reason = f"not built: {_short(str(error))}"
        return row
    for setting, options in SETTINGS.items():
        row.cells[setting], reason = _trained(directory, options, expected)
        row.reason = row.reason or reason
    try:
        served = check_served_model(directory)
    except Exception as error:
        row.reason = row.reason or f"generator not tried: {_first_sentence(error)}"
        return row
    row.cells["generator"] = served.status
    if served.status == "refused" and not row.reason:
        row.reason = f"generator: {_short(served.reason)}"
    return row


def render(rows: list[Row]) -> str:
    """The table in Markdown, with what it was made with."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "torch"))
    built = [row for row in rows if row.cells]
    packed = sum(row.cells["varlen"] == "packed" for row in built)
    padded = sum(row.cells["varlen"] == "padded" for row in built)
    unbuilt, refused = len(rows) - len(built), len(built) - packed - padded
    lines = [
        f"Made with {versions}. With its default options the trainer packs {packed} of {len(rows)} lines, pads {padded}"
        f" and refuses {refused}; {unbuilt} could not be built tiny.",
        "",
        "| model type | `varlen` | `sdpa` | `eager` | `sequences: padded` | generator | why not |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.cells.get(column, NOT_TRIED) for column in (*SETTINGS, "generator")]
        lines.append(f"| {row.name} | {' | '.join(cells)} | {row.reason} |")
    return "\n".join(lines) + "\n"


def read_table(text: str) -> Iterator[list[str]]:
    """The cells of each line of the table in a document."""
    table = text.split(BEGIN)[1].split(END)[0]
    for line in table.splitlines():
        if line.startswith("| ") and not line.startswith("| model type"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def write_table(rows: list[Row]) -> None:
    """Put the table into the document, where the last one was."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + render(rows) + END + rest.split(END)[1], encoding="utf-8")


def _trained(directory: Path, options: dict[str, Any], expected: torch.Tensor) -> tuple[str, str]:
    """``packed``, ``padded``, ``refused`` or ``wrong``, and why not packed."""
    source = ModelSource(str(directory), str(directory))
    trainer = FSDPTrainer(FSDPOptions(**options), RoleContext("trainer", source))
    try:
        trainer.setup()
        found = trainer.compute(_batch(), OutputRequest(frozenset({"logprobs", "entropy"})))
        model = trainer._model
        assert model is not None
        rows: str = model.rows
    except ModelError as error:
        return "refused", _short(
            re.split(r" Correct for this model| No other combination", str(error))[0].split("; with ")[-1]
        )
    finally:
        trainer.close()
    if not float((torch.stack([found["logprobs"], found["entropy"]]) - expected).abs().max()) <= TOLERANCE:
        return "wrong", "not told"
    refused = trainer.choice.refused if trainer.choice is not None else ()
    return rows, _short(refused[0][1]) if refused else ""


def _batch() -> TrainBatch:
    bounds = cumulative_lengths(LENGTHS)
    total = int(bounds[-1])
    draw = torch.Generator().manual_seed(5)
    learned = torch.ones(total, dtype=torch.bool)
    learned[bounds[:-1].long()] = False
    return TrainBatch(
        sample_ids=tuple(f"s{place}" for place in range(len(LENGTHS))),
        token_ids=torch.randint(5, VOCAB_SIZE, (total,), generator=draw),
        cu_seqlens=bounds,
        loss_mask=learned,
        unit_index=torch.arange(len(LENGTHS)),
        group_index=torch.arange(len(LENGTHS)),
    )


def _alone(plain: torch.nn.Module, batch: TrainBatch) -> torch.Tensor:
    """[2, T] logprobs and entropies from a plain forward pass of each sequence."""
    pieces = {}
    # Ascending: embeddings of type dynamic keep the frequencies of the longest sequence that they have seen.
    for start, stop in sorted(itertools.pairwise(batch.cu_seqlens.tolist()), key=lambda ends: ends[1] - ends[0]):
        tokens = batch.token_ids[start:stop]
        with torch.no_grad():
            distribution = plain(tokens)[:-1].float().log_softmax(-1)
        logprobs = distribution.gather(-1, tokens[1:, None]).squeeze(-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        pieces[start] = torch.cat([torch.zeros(2, 1), torch.stack([logprobs, entropy])], dim=1)
    return torch.cat([pieces[start] for start in sorted(pieces)], dim=1)


WORDS = {
    r"Unrecognized configuration class": "saved as a type that is not causal",
    r"requires the timm library": "needs timm",
    r"Field 'text_encoder'": "made of several models",
    r"carry a state": "layers carry a state",
    r"sparse attention selects": "sparse attention selects tokens of a row",
    r"has no attention 'varlen'": "attention code of its own",
    r"has no attention 'sdpa'": "no sdpa",
    r"got layout=False": "keyword arguments do not reach the attention",
    r"no attention mask and a batch of 1": "makes attention masks of its own",
    r"uses 'position_bias'": "position bias in attention",
    r"^attention \w+, sequences padded: logits differ from those": "not causal",
    r"beyond its window": "windows do not reach the attention",
    r"logits differ from those": "sequences of a row are not told apart",
    r"drops the soft cap": "sdpa drops soft caps on scores",
    r"its rotary embedding '(\w+)' depends": r"RoPE by length",
    r"computing through its cache failed": "its cache does not fit",
    r"logits differ": "its cache computes something else",
    r"do not match its config.json": "saved weights do not load again",
}


def _short(reason: str) -> str:
    for pattern, words in WORDS.items():
        if re.search(pattern, reason):
            return words
    return _first_sentence(reason)


def _first_sentence(error: object) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    return re.split(r"(?<=[a-z])[.:] ", line)[0].replace("|", "/")[:90]
