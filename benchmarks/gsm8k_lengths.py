"""Sequence lengths of GSM8K's training set, question and answer together: measured, or as recorded here."""

from __future__ import annotations

import json
from pathlib import Path

from chatlearn_hf.tiny import build_tiny_tokenizer

VOCAB_SIZE = 8192
BIN_TOKENS = 8
FILE = "train.jsonl"


def measured_lengths(directory: Path) -> list[int]:
    """Tokens of every row of ``directory/train.jsonl``, by a byte-level BPE of 8192 tokens learned from that file."""
    lines = (directory / FILE).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    texts = [f"{row['question']}\n{row['answer']}" for row in rows]
    tokenizer = build_tiny_tokenizer(VOCAB_SIZE, texts)
    return [len(ids) for ids in tokenizer(texts)["input_ids"]]


def histogram(lengths: list[int]) -> dict[int, int]:
    """Start of each bin of ``BIN_TOKENS`` tokens -> sequences in it."""
    bins = sorted({length // BIN_TOKENS * BIN_TOKENS for length in lengths})
    return {start: sum(start <= length < start + BIN_TOKENS for length in lengths) for start in bins}


def embedded_lengths() -> list[int]:
    """The recorded histogram as lengths, every sequence in the middle of its bin."""
    return [start + BIN_TOKENS // 2 for start, count in HISTOGRAM.items() for _ in range(count)]


# From GSM8K (7473 rows, as published) by measured_lengths: mean 151.9, longest 451 tokens.
HISTOGRAM: dict[int, int] = {
    48: 4,
    56: 29,
    64: 123,
    72: 209,
    80: 288,
    88: 380,
    96: 438,
    104: 500,
    112: 501,
    120: 478,
    128: 441,
    136: 444,
    144: 421,
    152: 352,
    160: 361,
    168: 323,
    176: 296,
    184: 297,
    192: 237,
    200: 171,
    208: 176,
    216: 153,
    224: 144,
    232: 127,
    240: 105,
    248: 76,
    256: 75,
    264: 56,
    272: 54,
    280: 46,
    288: 24,
    296: 30,
    304: 26,
    312: 19,
    320: 16,
    328: 7,
    336: 8,
    344: 4,
    352: 8,
    360: 7,
    368: 3,
    376: 5,
    384: 2,
    392: 5,
    408: 1,
    416: 1,
    424: 1,
    448: 1,
}
