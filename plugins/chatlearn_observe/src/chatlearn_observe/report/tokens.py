"""Finds the text of single tokens, so that a completion can be coloured token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.protocols.lifecycle import ModelSource

Decode = Callable[[Sequence[int]], str]
"""Function from token ids to text, including special tokens."""

_INCOMPLETE = "\ufffd"
"""Result of a byte-level tokenizer for an incomplete character."""
_LONGEST_CHARACTER = 4
"""Largest number of UTF-8 bytes in a character."""


def find_decoder(run_dir: Path, config: Mapping[str, Any], tokenizer: str | None) -> tuple[Decode | None, str]:
    """Load the tokenizer of a run with the installed model family.

    Args:
        run_dir: the run's directory.
        config: the run's configuration.
        tokenizer: a model directory or hub id to use instead of the run's own.

    Returns:
        The decoding function, or None; and the source of the tokenizer, or why there is none.
    """
    model = config.get("model") if isinstance(config.get("model"), dict) else {}
    assert isinstance(model, dict)
    if tokenizer:
        places = [tokenizer]
    else:
        exported = run_dir / "model"
        configured = model.get("tokenizer") or model.get("path")
        places = [str(exported)] if exported.is_dir() else []
        places += [str(configured)] if configured else []
    registry = discover_plugins()
    families = [record for record in registry.records("model_family") if not record.model_types]
    if not families:
        return None, "no installed plugin registers a model family that reads tokenizers"
    reasons = []
    for place in places:
        try:
            record = registry.select("model_family", families[0].name, "chatlearn report")
            family = registry.load_factory(record)(registry.load_options(record)())
            loaded = family.load_tokenizer(ModelSource(path=place, tokenizer_path=place))
        except (ChatLearnError, OSError, ValueError) as error:
            # The model may no longer exist: the report then shows ids, with the reason.
            reasons.append(f"{place}: {error}")
            continue
        return partial(_decode, loaded), place
    return None, "; ".join(reasons) or "the run's configuration names no model"


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


class TokenTexts:
    """Splits decoded text into one piece per token, and stores every distinct piece once.

    A token's piece is the text that it adds after the previous token, so a space that a tokenizer drops before a first
    word is kept here. If a character spans several tokens, the last one has the text and the earlier ones are empty.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._added: dict[tuple[int | None, tuple[int, ...]], str] = {}
        self._index: dict[str, int] = {}

    @property
    def pieces(self) -> list[str]:
        """Distinct pieces; ``indices`` points into this list."""
        return list(self._index)

    def indices(self, token_ids: Sequence[int]) -> list[int]:
        """Return the index in ``pieces`` of each token's piece."""
        return [self._index.setdefault(piece, len(self._index)) for piece in self.split(token_ids)]

    def split(self, token_ids: Sequence[int]) -> list[str]:
        """Return one piece per token."""
        pieces: list[str] = []
        before: int | None = None
        start = 0
        while start < len(token_ids):
            end = start + 1
            text = self._text(before, tuple(token_ids[start:end]))
            while _INCOMPLETE in text and end < min(len(token_ids), start + _LONGEST_CHARACTER):
                end += 1
                text = self._text(before, tuple(token_ids[start:end]))
            if _INCOMPLETE in text:  # never becomes a character: keep the token alone
                end = start + 1
                text = self._text(before, tuple(token_ids[start:end]))
            pieces += [""] * (end - start - 1) + [text]
            before = token_ids[end - 1]
            start = end
        return pieces

    def _text(self, before: int | None, ids: tuple[int, ...]) -> str:
        key = (before, ids)
        if key not in self._added:
            text = self._decode(ids)
            if before is not None:
                context, longer = self._decode((before,)), self._decode((before, *ids))
                if longer.startswith(context) and _INCOMPLETE not in context:
                    text = longer[len(context) :]
            self._added[key] = text
        return self._added[key]
