"""Finds control tokens that data spells, and encodes them as ordinary text.

``<|im_end|>`` inside a user's message is ten characters of text, but a tokenizer turns them into the token that ends a
turn. Data could therefore end turns and begin others. Only the chat template may write control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from chatlearn_core.data.tokenizer import Tokenizer
from chatlearn_core.exceptions import DataError

_PRIVATE_USE = range(0xF0000, 0xFFFFE)
"""Private-use characters: one replaces each control token while a template is rendered."""
_HARMLESS = "x"
"""Text without control tokens, which replaces hidden ones in a trial."""
_ANCHORS = ("", "\n", ".")
"""Texts that are put before a piece while it is encoded, and removed again: some tokenizers begin every text with a
space, which is wrong for a piece from the middle."""


@dataclass(slots=True, frozen=True)
class Hidden:
    """A value in whose texts a private-use character replaces each control token."""

    value: Any
    spelled: Mapping[str, str]
    """Character -> control token."""

    def reveal(self, text: str, spelling: str | None = None) -> str:
        """Return ``text`` with the control tokens restored, or each replaced by ``spelling``."""
        return text.translate({ord(character): spelling or token for character, token in self.spelled.items()})


class ControlTokens:
    """The special tokens of a tokenizer, and those that delimit turns.

    Args:
        tokenizer: its ``added_tokens_decoder`` says which tokens are special, and which of them absorb adjacent spaces.
        delimiters: added tokens by which a chat template begins and ends turns, special or not.
    """

    def __init__(self, tokenizer: Tokenizer, delimiters: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._special = {
            str(token): (token_id, token)
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if (token.special or str(token) in delimiters) and str(token).strip()
        }
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spelled_in(self, value: Any) -> tuple[str, ...]:
        """Return the control tokens that any text in ``value`` spells, each once."""
        return tuple(dict.fromkeys(token for text in _texts(value) for token in self._pattern.findall(text)))

    def last_at_end_of(self, text: str) -> str | None:
        """Return the control token at the end of ``text``; None if there is none."""
        return next((token for token in self._special if text.endswith(token)), None)

    def id_of(self, token: str) -> int:
        """Return the id of a control token."""
        return self._special[token][0]

    def token_of(self, token_id: int) -> str | None:
        """Return the control token with this id; None if it is another token."""
        return next((token for token, (own, _) in self._special.items() if own == token_id), None)

    def hide(self, value: Any) -> Hidden:
        """Replace every control token in the texts of ``value`` by a character.

        Raises:
            DataError: the value is nested too deeply.
        """
        tokens = self.spelled_in(value)
        used = set().union(*_texts(value))
        free = islice((character for character in map(chr, _PRIVATE_USE) if character not in used), len(tokens))
        character_of = dict(zip(tokens, free, strict=True))
        try:
            hidden = _map_texts(value, lambda text: self._pattern.sub(lambda match: character_of[match[0]], text))
        except RecursionError:
            raise DataError("the prompt is nested too deeply") from None
        return Hidden(hidden, {character: token for token, character in character_of.items()})

    def encode(self, text: str, hidden: Hidden) -> list[int]:
        """Encode a text that a template rendered from ``hidden``: only the template's own control tokens become tokens.

        Tokenizers encode the text between two control tokens separately, and so does this method. It checks that this
        holds for the tokenizer: with a harmless word in each hidden place, the pieces must encode like the whole text.

        Raises:
            DataError: this tokenizer cannot encode the spelled control tokens as text.
        """
        whole = self._tokenizer.encode(hidden.reveal(text, _HARMLESS), add_special_tokens=False)
        for anchor in _ANCHORS:
            if self._in_pieces(text, lambda piece: hidden.reveal(piece, _HARMLESS), anchor) == whole:
                ids = self._in_pieces(text, hidden.reveal, anchor)
                if ids is not None:
                    return ids
        raise self._not_text(hidden)

    def encode_verbatim(self, hidden: Hidden) -> list[int]:
        """Encode a plain text, with the control tokens that the tokenizer itself adds around it.

        Raises:
            DataError: this tokenizer cannot encode the spelled control tokens as text.
        """
        harmless = self._tokenizer.encode(hidden.reveal(hidden.value, _HARMLESS), add_special_tokens=True)
        text = hidden.reveal(hidden.value)
        ids = self._splitting.encode(text, add_special_tokens=True, split_special_tokens=True)
        if self._num_special(ids) != self._num_special(harmless):
            raise self._not_text(hidden)
        return ids

    def _in_pieces(self, text: str, written: Callable[[str], str], anchor: str) -> list[int] | None:
        """Encode ``text`` piece by piece, with ``written`` applied between its control tokens; None if that fails."""
        ids: list[int] = []
        pieces = self._pattern.split(text)
        around = [None, *(self._special[token] for token in self._pattern.findall(text)), None]
        for index, piece in enumerate(pieces):
            before, after = around[index], around[index + 1]
            if before is not None:
                token_id, token = before
                ids.append(token_id)
                piece = piece.lstrip() if token.rstrip else piece
            if after is not None and after[1].lstrip:
                piece = piece.rstrip()
            encoded = self._text_ids(written(piece), anchor if index else "")
            if encoded is None:
                return None
            ids += encoded
        return ids

    def _text_ids(self, text: str, anchor: str) -> list[int] | None:
        """Encode a piece of text without control tokens; None if the tokenizer cannot."""
        if not text:
            return []
        ids = self._splitting.encode(anchor + text, add_special_tokens=False, split_special_tokens=True)
        head = self._tokenizer.encode(anchor, add_special_tokens=False) if anchor else []
        if ids[: len(head)] != head or self._num_special(ids):
            return None
        return ids[len(head) :]

    @cached_property
    def _splitting(self) -> Tokenizer:
        """The tokenizer, or a copy to which all control tokens are special, because ``split_special_tokens`` splits
        only those.

        A tokenizer without Hugging Face's ``add_tokens`` is used unchanged; texts that it turns into tokens are
        refused.
        """
        ordinary = [token for _, token in self._special.values() if not token.special]
        if not ordinary or not hasattr(self._tokenizer, "add_tokens"):
            return self._tokenizer
        marked = deepcopy(ordinary)
        for token in marked:
            token.special = True
        tokenizer: Any = deepcopy(self._tokenizer)
        tokenizer.add_tokens(marked, special_tokens=True)
        return tokenizer  # type: ignore[no-any-return]

    def _num_special(self, ids: list[int]) -> int:
        """Count the control tokens among ids, without the token for unknown characters."""
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        special = {token_id for token_id, _ in self._special.values()} - {unknown}
        return sum(token_id in special for token_id in ids)

    def _not_text(self, hidden: Hidden) -> DataError:
        return DataError(
            f"the text spells control tokens ({', '.join(hidden.spelled.values())}), and this tokenizer cannot encode "
            "them as text; remove them, or set data.control_tokens=special to encode them as tokens"
        )


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value, including keys, at any depth."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            waiting += [*one.values(), *one.keys()]
        elif isinstance(one, list | tuple):
            waiting += reversed(one)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(key, change): _map_texts(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_texts(one, change) for one in value)
    return value
