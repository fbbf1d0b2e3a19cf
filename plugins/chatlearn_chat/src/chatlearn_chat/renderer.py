"""Renders raw examples to tokens: chat template, verbatim text, completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np

from chatlearn_chat.continuation import text_after_turn
from chatlearn_chat.control_tokens import ControlTokens, Hidden
from chatlearn_chat.conversation import MarkedConversation, marked_conversation
from chatlearn_chat.deadline import Deadline, TooSlowError
from chatlearn_chat.messages import checked_completion, checked_prompt, has_assistant, single_text, text_of
from chatlearn_chat.shortest_encoding import ShortestEncoding
from chatlearn_chat.tool_call_probe import NO_TOOLS, ToolCallStyle, tool_call_style
from chatlearn_chat.turn_delimiters import turn_delimiters
from chatlearn_core.data.format import Message
from chatlearn_core.data.tokenizer import Tokenizer
from chatlearn_core.exceptions import DataError, ModelError
from chatlearn_core.protocols.prompt_renderer import (
    ControlTokenPolicy,
    RenderedDemonstration,
    RenderedPrompt,
    TooLongError,
)
from chatlearn_core.types import TokenIds

_KEPT_REPLIES = 256
"""Texts behind turns whose ids are kept."""
_PROBED_CONTENTS = ("\U0010fff0", "\U0010fff1", "\U0010fff2")
"""Private-use characters, one for the content of each message of a conversation that is searched for ends of turns."""
TEMPLATE_TIMEOUT_S = 20.0
"""Longest time in seconds for one conversation. A conversation takes milliseconds, so a longer template does not
terminate."""


@dataclass(slots=True, frozen=True)
class ChatTemplateRenderer:
    """Renders prompts the same way for a whole run.

    With ``apply_chat_template`` messages are rendered with the tokenizer's template and the generation prompt, and a
    plain string first becomes one user message. If the tokenizer has no template, a plain string is used verbatim and
    messages are an error. Without ``apply_chat_template``, a string is used verbatim and messages become their contents
    joined by blank lines. Verbatim text gets the special tokens that the tokenizer puts before plain text; a rendered
    template has its own.

    Control tokens that the data spells are text unless ``control_tokens`` says otherwise; a row without any gets
    exactly the tokenizer's ids.
    """

    tokenizer: Tokenizer
    apply_chat_template: bool = True
    system_prompt: str | None = None
    control_tokens: ControlTokenPolicy = "text"
    max_tokens: int | None = None
    """Texts that certainly have more tokens are not tokenised."""
    _control: ControlTokens = field(init=False, repr=False)
    _shortest: ShortestEncoding = field(init=False, repr=False)
    _end_of_turn: str | None = field(init=False, repr=False)
    _end_of_earlier_turns: str | None = field(init=False, repr=False)
    _generation_prompt: str = field(init=False, repr=False)
    _deadline: Deadline = field(init=False, repr=False)
    _replies: dict[str, list[int]] = field(init=False, repr=False, compare=False)
    """Text behind a turn -> its ids. Environments often say the same to many conversations at once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_deadline", Deadline(TEMPLATE_TIMEOUT_S))
        object.__setattr__(self, "_replies", {})
        object.__setattr__(self, "_control", ControlTokens(self.tokenizer, self._turn_delimiters()))
        object.__setattr__(self, "_shortest", ShortestEncoding(self.tokenizer))
        object.__setattr__(self, "_end_of_turn", self._found_end_of_turn() if self.uses_template else None)
        object.__setattr__(self, "_end_of_earlier_turns", self._found_end_of_earlier_turns())
        object.__setattr__(self, "_generation_prompt", self._found_generation_prompt() if self.uses_template else "")

    def spelled_control_tokens(self, *texts: Any) -> tuple[str, ...]:
        """Return the control tokens that prompts and completions spell, each once."""
        return self._control.spelled_in(texts)

    def prompt(self, prompt: str | Sequence[Message], tools: Sequence[Any] = ()) -> RenderedPrompt:
        """Render one prompt, with the tools for its template.

        Raises:
            TooLongError: the prompt is certainly longer than ``max_tokens``.
            DataError: the prompt is empty or malformed; has only the reason.
        """
        messages = self._messages(prompt)
        kept = () if isinstance(prompt, str) else messages
        if self.uses_template:
            if self.system_prompt is not None:
                kept = messages  # nothing could take the plain string out of the rendered text again
            text, ids = self._chat(messages, tools)
        elif self.apply_chat_template and kept:
            raise DataError(
                "the prompt is a chat, but the tokenizer has no chat template; use a model with one, "
                "or set data.apply_chat_template=false to join the messages' contents by blank lines"
            )
        else:
            text = "\n\n".join(text_of(message) for message in messages)
            ids = self._verbatim(text)
        if not ids:
            raise DataError("the prompt has no tokens")
        return RenderedPrompt(text, np.asarray(ids, dtype=np.int64), kept)

    def continuation(
        self, messages: Sequence[Message], index: int, end_id: int | None, tools: Sequence[Any] = ()
    ) -> TokenIds:
        """Render what follows a sampled turn, up to the next generation prompt: [N] ids to append to the sampled ones.

        Nothing before is encoded again, so the conversation's tokens stay those that the policy sampled.

        Args:
            messages: the whole conversation, including the sampled turn and the messages that follow it.
            index: position of the sampled turn in ``messages``.
            end_id: the sampled token that ended the turn. None if a limit or a stop string ended it: the token by which
                the template ends a turn is then appended, too.
            tools: tools for the template.

        Raises:
            TooLongError: the text behind the turn is certainly longer than ``max_tokens``.
            DataError: there is no template, a message is malformed, or the end of the turn cannot be located; has only
                the reason.
        """
        if not self.uses_template:
            raise DataError("the tokenizer has no chat template, which a conversation of several turns needs")
        given = checked_prompt(messages)
        if index + 1 >= len(given) or given[index + 1]["role"] == "assistant":
            raise DataError(f"message {index + 1} must be another's, not the assistant's, to follow its turn")
        whole = self._messages(given)
        index += len(whole) - len(given)
        hidden = self._hidden(whole, tools)
        if hidden.spelled:
            self._revealed(hidden, self._template(hidden.value[0], True, hidden.value[1]), whole, tools, True)
        end = None if end_id is None else self._control.token_of(end_id)
        text = text_after_turn(
            hidden.value[0],
            index,
            lambda shown, ask: self._template(shown, ask, hidden.value[1]),
            generation_prompt=self._generation_prompt,
            sampled_end=end,
            ends_of_turns=tuple(filter(None, (self._end_of_turn, self._end_of_earlier_turns))),
        )
        self._check_length(text)
        if end is None:
            return np.asarray(self._encode_reply(text, hidden), dtype=np.int64)
        ids = self._encode_reply(end + text, hidden)  # together, because a tokenizer may begin each text with a space
        assert ids[:1] == [end_id], "a control token is encoded as itself"
        return np.asarray(ids[1:], dtype=np.int64)

    @property
    def uses_template(self) -> bool:
        """Whether prompts are rendered with the tokenizer's chat template."""
        return self.apply_chat_template and self.tokenizer.chat_template is not None

    @property
    def end_of_turn_id(self) -> int | None:
        """Id of the token by which the chat template ends the assistant's turn; None if there is no template or no such
        token.
        """
        return None if self._end_of_turn is None else self._control.id_of(self._end_of_turn)

    @property
    def tool_call_style(self) -> ToolCallStyle:
        """How the chat template writes tools and calls; found by rendering some."""
        return tool_call_style(self._template, self._control) if self.uses_template else NO_TOOLS

    def demonstration(
        self,
        prompt: str | Sequence[Message],
        completion: str | Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        imitates_prompt: bool = False,
    ) -> RenderedDemonstration:
        """Render a demonstration and mark the imitated tokens.

        With a template these are the assistant's turns, each from the end of the generation prompt to the token that
        ends it. Without a template it is the text of the completion, ended by the end-of-sequence token.

        Args:
            prompt: text, or messages.
            completion: text, or messages of which the assistant's are imitated, except those with ``weight: 0``.
            tools: tools for the template.
            imitates_prompt: whether to imitate the assistant's turns in the prompt too. The demonstration's prompt then
                ends
                before the first imitated turn.

        Raises:
            TooLongError: the text is certainly longer than ``max_tokens``.
            DataError: there is nothing to imitate, a message is malformed, or a turn cannot be located in the rendered
                text; has only the reason.
        """
        if not self.uses_template:
            ids = self.completion(single_text(completion, imitates_prompt and has_assistant(prompt)))
            return RenderedDemonstration(self.prompt(prompt, tools), ids, np.ones(len(ids), np.bool_))
        start = self._messages(prompt)
        added = checked_completion(completion)
        messages: list[Message] = [*start, *added]
        imitated = [
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and message.get("weight", 1) != 0 and index > 0
            if imitates_prompt or index >= len(start)
        ]
        if not imitated:
            raise DataError("there is no assistant message to imitate")
        messages = messages[: imitated[-1] + 1]
        self._spelled((messages, list(tools)))  # under the policy "refuse" this also refuses written end-of-turn tokens
        messages = [self._without_written_end(message) for message in messages]
        hidden = self._hidden(messages, tools)
        if hidden.spelled:
            self._revealed(hidden, self._template(hidden.value[0], False, hidden.value[1]), messages, tools, False)
        marked = marked_conversation(
            hidden.value[0], imitated, lambda shown, ask: self._template(shown, ask, hidden.value[1]), self._control
        )
        self._check_length(marked.text)
        pieces = self._encoded_turns(marked, hidden)
        if not pieces[0]:
            raise DataError("the prompt has no tokens")
        text = hidden.reveal(marked.text[: marked.turns[0][0]])
        kept = () if isinstance(prompt, str) else tuple(messages[: imitated[0]])
        rendered = RenderedPrompt(text, np.asarray(pieces[0], dtype=np.int64), kept)
        # After the prompt, turns and the text between them alternate.
        mask = np.concatenate([np.full(len(piece), index % 2 == 0) for index, piece in enumerate(pieces[1:])])
        return RenderedDemonstration(rendered, np.concatenate(pieces[1:]).astype(np.int64), mask)

    def _encoded_turns(self, marked: MarkedConversation, hidden: Hidden) -> list[list[int]]:
        """Encode the prompt, the first turn, the text between it and the next turn, that turn, and so on.

        Sampling starts from the prompt encoded alone, so a turn's tokens must begin where its text does. If separately
        encoded pieces differ from the whole (tokenizers that begin each text with a space), the pieces are cut from the
        whole encoding, provided that tokens begin there.
        """
        places = [place for turn in marked.turns for place in turn]
        pieces = [self._encode_hidden(marked.text[a:b], hidden) for a, b in pairwise([0, *places])]
        whole = self._encode_hidden(marked.text, hidden)
        if list(chain.from_iterable(pieces)) != whole:
            before = [self._encode_hidden(marked.text[:place], hidden) for place in places[:-1]]
            if all(whole[: len(ids)] == ids for ids in before):
                pieces = [whole[a:b] for a, b in pairwise([0, *map(len, before), len(whole)])]
        if not marked.is_ended:
            eos = self.tokenizer.eos_token_id
            if eos is None:
                raise DataError("neither chat template nor tokenizer has a token that ends a turn")
            if pieces[-1][-1:] != [eos]:
                pieces[-1] = [*pieces[-1], eos]
        return pieces

    def _messages(self, prompt: str | Sequence[Message]) -> tuple[Mapping[str, Any], ...]:
        """Return the messages of a prompt, with the configured system prompt first."""
        messages = checked_prompt(prompt)
        if isinstance(prompt, str) and not prompt.strip():
            raise DataError("the prompt is empty")
        if self.system_prompt is not None and not any(message["role"] == "system" for message in messages):
            messages = ({"role": "system", "content": self.system_prompt}, *messages)
        return messages

    def _turn_delimiters(self) -> frozenset[str]:
        """Return the tokens that delimit turns, for a tokenizer with added tokens that are not special."""
        added = self.tokenizer.added_tokens_decoder.values()
        if self.tokenizer.chat_template is None or all(token.special for token in added):
            return frozenset()
        try:
            return turn_delimiters([str(token) for token in added], self._template)
        except ModelError:
            if self.uses_template:
                raise
            return frozenset()  # the template does not terminate, but the run does not use it

    def _found_end_of_turn(self) -> str | None:
        try:
            text = self._template([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], False)
        except DataError:
            return None  # the template needs another kind of conversation
        return self._control.last_at_end_of(text.rstrip())

    def _found_end_of_earlier_turns(self) -> str | None:
        """The token that ends a turn which others follow, if it is not that of a last turn (gpt-oss)."""
        if self._end_of_turn is None:
            return None
        messages = [
            {"role": role, "content": content}
            for role, content in zip(("user", "assistant", "user"), _PROBED_CONTENTS, strict=True)
        ]
        try:
            behind = self._template(messages, False).partition(_PROBED_CONTENTS[1])[2]
        except DataError:
            return None  # the template needs another kind of conversation
        ends = self._control.spelled_in(behind.partition(_PROBED_CONTENTS[2])[0])
        return ends[0] if ends and self._end_of_turn not in ends else None

    def _found_generation_prompt(self) -> str:
        question = [{"role": "user", "content": "x"}]
        try:
            without, text = self._template(question, False), self._template(question, True)
        except DataError:
            return ""  # the template needs another kind of conversation
        return text.removeprefix(without) if text.startswith(without) else ""

    def _without_written_end(self, message: Message) -> Message:
        """Remove a written end-of-turn token from the message, because the template adds it."""
        content = message["content"]
        if message["role"] == "assistant" and isinstance(content, str):
            stripped = content.rstrip()
            for token in (self._end_of_turn, self._eos_text()):
                if token and stripped.endswith(token):
                    return {**message, "content": stripped.removesuffix(token)}
        return message

    def _hidden(self, messages: Sequence[Message], tools: Sequence[Any]) -> Hidden:
        """Hide the control tokens in messages and tools, unless they are meant as tokens."""
        value = (list(messages), list(tools))
        if not self._spelled(value) or self.control_tokens == "special":
            return Hidden(value, {})
        return self._control.hide(value)

    def _encode_reply(self, text: str, hidden: Hidden) -> list[int]:
        """``_encode_hidden``, with the ids of the latest texts kept."""
        if hidden.spelled:
            return self._encode_hidden(text, hidden)
        ids = self._replies.get(text)
        if ids is None:
            if len(self._replies) >= _KEPT_REPLIES:
                self._replies.clear()
            ids = self._replies[text] = self._encode_hidden(text, hidden)
        return ids

    def _encode_hidden(self, text: str, hidden: Hidden) -> list[int]:
        if not text:
            return []
        return self._control.encode(text, hidden) if hidden.spelled else self._encode(text)

    def completion(self, text: str) -> TokenIds:
        """Encode a completion to imitate, [C], ended by the end-of-sequence token.

        Raises:
            DataError: the completion is empty, or the tokenizer has no end-of-sequence token; has only the reason.
        """
        if not text.strip():
            raise DataError("the completion is empty")
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise DataError("the tokenizer has no end-of-sequence token, so a completion cannot be ended")
        self._check_length(text)
        spelled = self._spelled(text)
        if not spelled or self.control_tokens == "special":
            ids = self._encode(text)
        else:  # a written end-of-sequence token at the end is meant as a token
            hidden = self._control.hide(text.rstrip().removesuffix(self._eos_text()))
            ids = self._control.encode(hidden.value, hidden)
        return np.asarray([*ids, eos] if ids[-1:] != [eos] else ids, dtype=np.int64)

    def _chat(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[str, list[int]]:
        """Render messages with the tokenizer's template and the generation prompt; return text and ids."""
        text = self._template(messages, True, tools)
        self._check_length(text)
        hidden = self._hidden(messages, tools)
        if not hidden.spelled:
            return text, self._encode(text)
        rendered = self._template(hidden.value[0], True, hidden.value[1])
        self._revealed(hidden, rendered, messages, tools, True)
        return text, self._control.encode(rendered, hidden)

    def _revealed(
        self, hidden: Hidden, rendered: str, messages: Sequence[Message], tools: Sequence[Any], generation_prompt: bool
    ) -> None:
        """Check that hiding control tokens changed nothing else.

        Raises:
            DataError: the template reacts to the control tokens.
        """
        if hidden.reveal(rendered) != self._template(messages, generation_prompt, tools):
            names = ", ".join(hidden.spelled.values())
            raise DataError(
                f"the chat template reacts to the control tokens that the messages spell ({names}), so they cannot be "
                "encoded as text; remove them, or set data.control_tokens=special to encode them as tokens"
            )

    def _template(self, messages: Sequence[Message], generation_prompt: bool, tools: Sequence[Any] = ()) -> str:
        settings: dict[str, Any] = {"tools": list(tools)} if tools else {}

        def rendered() -> Any:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt, **settings
            )

        try:
            text = self._deadline.call(rendered)
        except TooSlowError as error:
            raise ModelError(
                f"the tokenizer's chat template {error} for one conversation: it loops, or its time grows with"
                " the length of a text; use another template, or set data.apply_chat_template=false"
            ) from error
        except Exception as error:  # templates are third-party programs and may raise anything
            raise DataError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            raise DataError(f"the chat template returned {type(text).__name__}, not text")
        return text

    def _verbatim(self, text: str) -> list[int]:
        """Encode plain text, without an end-of-sequence token that the tokenizer appends, which would end
        the prompt.
        """
        self._check_length(text)
        eos = self.tokenizer.eos_token_id
        if self._spelled(text) and self.control_tokens == "text":
            ids = self._control.encode_verbatim(self._control.hide(text))
            return ids[:-1] if ids and ids[-1] == eos else ids
        ids = self._encode(text, add_special_tokens=True)
        if ids and ids[-1] == eos and not text.endswith(self._eos_text()):
            return ids[:-1]
        return ids

    def _spelled(self, value: Any) -> bool:
        """Whether texts in ``value`` spell control tokens.

        Raises:
            DataError: they do, and ``control_tokens`` is ``refuse``.
        """
        spelled = self._control.spelled_in(value)
        if spelled and self.control_tokens == "refuse":
            raise DataError(f"the text spells control tokens ({', '.join(spelled)}), which data.control_tokens refuses")
        return bool(spelled)

    def _check_length(self, text: str) -> None:
        if self.max_tokens is not None and len(text) > self.max_tokens:
            at_least = self._shortest.num_tokens(text)
            if at_least > self.max_tokens:
                raise TooLongError(at_least)

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # several libraries, the Rust one raising bare Exception
            raise DataError(f"the tokenizer refuses the text: {type(error).__name__}: {error}") from error

    def _eos_text(self) -> str:
        """Return the text of the end-of-sequence token; empty if there is none."""
        eos = self.tokenizer.eos_token_id
        return "" if eos is None else self.tokenizer.decode([eos], skip_special_tokens=False)
