"""Takes a sampled turn apart: text, tool calls, and what ended it."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from chatlearn_chat.renderer import ChatTemplateRenderer
from chatlearn_chat.tool_call_probe import in_form
from chatlearn_chat.tool_calls import FORMATS, FormatName, attempts_tool_call, parsed_tool_calls, turn_content
from chatlearn_chat.turn_stream import REPLACEMENT, TurnStream
from chatlearn_core.data.format import Message
from chatlearn_core.types import Completion, SamplingParams

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class TextPiece:
    """A part of a turn's content and the tokens that it is made of, for streaming."""

    text: str
    tokens: tuple[int, int]
    """[start, stop) in the sampled tokens."""


@dataclass(slots=True, frozen=True)
class ReadTurn:
    """A sampled turn as a client sees it."""

    content: str
    calls: tuple[tuple[str, str], ...]
    """(name, JSON of the arguments) of each tool call."""
    end_id: int | None
    """The sampled token that ended the turn; None if a limit or a stop string did."""
    stop_string: str | None
    pieces: tuple[TextPiece, ...]
    """``content`` in parts of whole characters; empty if they are not needed."""
    attempted_call: bool = False
    """Whether the turn began a tool call but has none that can be read, so that its text is the content."""


class TurnReader:
    """Reads the turns of one model.

    Args:
        renderer: of the model's tokenizer.
        written: format of the tool calls that the policy writes; None takes that of the chat template.
    """

    def __init__(self, renderer: ChatTemplateRenderer, written: FormatName | None = None) -> None:
        self.renderer = renderer
        self._tokenizer: Any = renderer.tokenizer
        self.style = renderer.tool_call_style
        self.written: FormatName = written or self.style.written
        special = {
            token_id: str(token) for token_id, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }
        self._lock = threading.Lock()
        self._copy: TurnReader | None = None
        self._ends = {*special, self._tokenizer.eos_token_id, renderer.end_of_turn_id}
        # Decoding must leave the markers of tool calls.
        self._skip = not set(FORMATS[self.written].markers) & set(special.values())

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token alone."""
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]

    def for_template(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with the arguments of tool calls in the form that the chat template takes: an object, or text."""
        return in_form(messages, self.style.arguments)

    async def apart(self, work: Callable[[TurnReader], T]) -> T:
        """Run ``work`` with a copy of this reader in a thread, one at a time: encoding a long text takes seconds, in
        which the event loop goes on.
        """
        if self._copy is None:  # here, where nothing else uses the tokenizer meanwhile
            self._copy = reader_of(self._tokenizer, self.written, max_tokens=self.renderer.max_tokens)
        copied = self._copy

        def run() -> T:
            with self._lock:
                return work(copied)

        return await asyncio.to_thread(run)

    def read(self, completion: Completion, *, tools: Sequence[Mapping[str, Any]], in_pieces: bool) -> ReadTurn:
        """Take a completion apart.

        Args:
            tools: as chat templates take them; without any, a text that looks like a call is content.
            in_pieces: whether ``pieces`` are needed, which take time for every token.
        """
        ids = completion.token_ids.tolist()
        stopped = completion.finish_reason == "stop"
        stop_ids = completion.sampling.stop_token_ids
        end_id = ids[-1] if stopped and ids and (ids[-1] in self._ends or ids[-1] in stop_ids) else None
        written = ids if end_id is None else ids[:-1]
        content = self._tokenizer.decode(written, skip_special_tokens=self._skip)
        stop_string, calls, attempted = None, list[tuple[str, str]](), False
        if stopped and end_id is None:
            content, stop_string = _before_stop(content, completion.sampling.stop)
        if tools and stop_string is None:
            raw = content
            content, calls = parsed_tool_calls(raw, self.written, tools)
            attempted = not calls and attempts_tool_call(raw, self.written)
        else:
            content = turn_content(content, self.written)
        pieces = self._pieces(written, content, len(ids)) if in_pieces else ()
        return ReadTurn(content, tuple(calls), end_id, stop_string, pieces, attempted)

    def stream(self, sampling: SamplingParams, *, tools: Sequence[Mapping[str, Any]]) -> TurnStream | None:
        """Reads a turn while it is sampled; None if its content is known only when it is complete.

        Args:
            tools: as for ``read``.
        """
        form = FORMATS[self.written]
        if form.content is not None or self._cleans_up:
            return None
        calls = (form.markers, self.written == "json") if tools else None
        return TurnStream(
            self._tokenizer, self._ends | set(sampling.stop_token_ids), sampling.stop, calls, skips_special=self._skip
        )

    @cached_property
    def _cleans_up(self) -> bool:
        """Whether decoding removes spaces before punctuation, so that a token changes the text before it."""
        if not getattr(self._tokenizer, "clean_up_tokenization_spaces", False):
            return False
        ids = self._tokenizer.encode("a .", add_special_tokens=False)
        kept: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return bool(self._tokenizer.decode(ids) != kept)

    def _pieces(self, ids: Sequence[int], content: str, num_tokens: int) -> tuple[TextPiece, ...]:
        """The content in parts; one part if it is not simply the tokens' texts in a row."""
        pieces: list[TextPiece] = []
        start = 0
        for stop in range(1, len(ids) + 1):
            text = self._tokenizer.decode(ids[start:stop], skip_special_tokens=self._skip)
            if not text.endswith(REPLACEMENT) or stop == len(ids):
                pieces.append(TextPiece(text, (start, stop)))
                start = stop
        if "".join(piece.text for piece in pieces) != content or not pieces:
            return (TextPiece(content, (0, num_tokens)),)
        last = pieces[-1]
        return (*pieces[:-1], TextPiece(last.text, (last.tokens[0], num_tokens)))


def reader_of(tokenizer: Any, written: FormatName | None = None, *, max_tokens: int | None = None) -> TurnReader:
    """A reader with a copy of the tokenizer, because encoding changes settings of a tokenizer that others use, too.

    Args:
        max_tokens: longest sequence of the run; texts that certainly have more tokens are not encoded.
    """
    return TurnReader(ChatTemplateRenderer(copy.deepcopy(tokenizer), max_tokens=max_tokens), written)


def _before_stop(content: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The content before the first stop string in it, and that string."""
    places = [(content.find(stop), stop) for stop in stops if stop in content]
    if not places:
        return content, None
    place, stop = min(places)
    return content[:place], stop
