"""Token texts, with tokenizers small enough to check by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from chatlearn_core.exceptions import ModelError
from chatlearn_observe.report import tokens
from chatlearn_observe.report.tokens import TokenTexts, find_decoder


def decode_bytes(ids: Sequence[int]) -> str:
    """Every token is a byte, as in the worst case of a byte-level tokenizer."""
    return bytes(ids).decode("utf-8", "replace")


def decode_words(ids: Sequence[int]) -> str:
    """Drops the space before the first word, as SentencePiece tokenizers do."""
    return "".join([" one", " two", "!"][token] for token in ids).removeprefix(" ")


def test_pieces_put_together_are_the_text() -> None:
    text = "naïve 日本 🙂!\n"
    pieces = TokenTexts(decode_bytes).split(list(text.encode()))
    assert "".join(pieces) == text
    assert len(pieces) == len(text.encode())
    assert pieces[2:4] == ["", "ï"]


def test_bytes_that_are_no_character_stand_for_themselves() -> None:
    assert TokenTexts(decode_bytes).split([0x61, 0xFF, 0xE2, 0x62]) == ["a", "\ufffd", "\ufffd", "b"]


def test_the_space_before_a_word_is_kept() -> None:
    assert TokenTexts(decode_words).split([0, 1, 2, 1]) == ["one", " two", "!", " two"]


def test_distinct_pieces_are_kept_once() -> None:
    texts = TokenTexts(decode_words)
    assert texts.indices([0, 1, 1]) == [0, 1, 1]
    assert texts.indices([1]) == [2]  # a first word has no space
    assert texts.pieces == ["one", " two", "two"]


def test_no_model_is_a_reason_and_not_an_error(tmp_path: Path) -> None:
    decode, reason = find_decoder(tmp_path, {}, None)
    assert decode is None
    assert "names no model" in reason


def test_places_are_tried_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    tried: list[str] = []

    class Family:
        def __init__(self, options: object) -> None: ...

        def load_tokenizer(self, source: object) -> object:
            tried.append(source.path)  # type: ignore[attr-defined]  # a ModelSource
            if len(tried) == 1:
                raise ModelError("no tokenizer there")

            class Tokenizer:
                def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
                    return f"{ids}{skip_special_tokens}"

            return Tokenizer()

    registry = tokens.discover_plugins()
    monkeypatch.setattr(type(registry), "load_factory", lambda *_: Family)
    decode, place = find_decoder(tmp_path, {"model": {"path": "base", "tokenizer": None}}, None)
    assert tried == [str(tmp_path / "model"), "base"]
    assert place == "base"
    assert decode is not None
    assert decode((1, 2)) == "[1, 2]False"
