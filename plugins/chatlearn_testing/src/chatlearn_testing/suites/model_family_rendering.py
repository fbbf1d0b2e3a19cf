"""The contract of a family's tokenizer and renderer: the same text gives the same tokens, which the model has."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import pytest

from chatlearn_core.exceptions import DataError
from chatlearn_core.protocols.prompt_renderer import (
    ControlTokenPolicy,
    PromptRenderer,
    RenderedDemonstration,
    RenderedPrompt,
    TooLongError,
)
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.suites.model_family_models import BuiltModel, ModelFamilySuite

POLICIES: tuple[ControlTokenPolicy, ...] = get_args(ControlTokenPolicy)
SYSTEM = "You are a conformance suite."
LONG = 20_000
"""Repetitions of a text that is certainly too long."""


class RenderingContract(ModelFamilySuite):
    """Contract tests of ``load_tokenizer`` and ``renderer``."""

    def test_a_tokenizer_has_its_methods(self, models: Sequence[BuiltModel]) -> None:
        """The object has the attributes of ``chatlearn_core.data.Tokenizer``."""
        for model in models:
            tokenizer = self._family().load_tokenizer(model.source)
            missing = [
                name for name in ("encode", "decode", "get_vocab") if not callable(getattr(tokenizer, name, None))
            ]
            attributes = ("eos_token_id", "chat_template", "added_tokens_decoder")
            missing += [name for name in attributes if not hasattr(tokenizer, name)]
            if tokenizer.chat_template is not None and not callable(getattr(tokenizer, "apply_chat_template", None)):
                missing.append("apply_chat_template")
            assert not missing, f"attributes of chatlearn_core.data.Tokenizer are missing: {', '.join(missing)}"

    def test_every_token_is_in_the_vocabulary(self, models: Sequence[BuiltModel]) -> None:
        """All ids of the tokenizer, the end of sequence among them, are rows of the model's embedding."""
        for model, tokenizer in self._tokenizers(models):
            ids = [*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder]
            ids += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            rows = self._family().facts(model.source).vocab_size
            outside = [token for token in ids if not 0 <= token < rows]
            assert not outside, f"{model.case.model_type}: token {outside[0]} is outside the model's {rows} tokens"

    def test_text_comes_back(self, models: Sequence[BuiltModel]) -> None:
        """``decode`` of what ``encode`` made of the case's text is that text; both repeat."""
        for model, tokenizer in self._tokenizers(models):
            text = model.case.text
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids, f"{text!r} has no tokens"
            assert all(isinstance(token, int) for token in ids), f"encode returned {ids!r:.80}, not a list of ids"
            assert tokenizer.encode(text, add_special_tokens=False) == ids, "encoding a text again gives other ids"
            found = tokenizer.decode(ids, skip_special_tokens=True)
            assert found == text, f"{text!r} comes back as {found!r}"

    def test_a_renderer_has_the_policy_it_was_made_with(self, models: Sequence[BuiltModel]) -> None:
        """``control_tokens`` is the argument of ``renderer``, and ``end_of_turn_id`` a token of the model, or None."""
        for model, tokenizer in self._tokenizers(models):
            for policy in POLICIES:
                renderer = self._family().renderer(tokenizer, control_tokens=policy)
                assert renderer.control_tokens == policy, f"made with {policy!r}, has {renderer.control_tokens!r}"
                end = renderer.end_of_turn_id
                rows = self._family().facts(model.source).vocab_size
                assert end is None or 0 <= end < rows, f"end_of_turn_id is {end!r}; the model has {rows} tokens"

    def test_a_prompt_becomes_tokens_of_the_model(self, models: Sequence[BuiltModel]) -> None:
        """A text renders to int64 ids [P] of the model, at least one, and to the text that these ids stand for; again
        and by another renderer, to the same.
        """
        for model, tokenizer in self._tokenizers(models):
            renderer = self._renderer(tokenizer)
            for prompt in self._prompts(model, tokenizer):
                rendered = renderer.prompt(prompt)
                assert isinstance(rendered, RenderedPrompt), f"prompt returned {rendered!r:.80}, not a RenderedPrompt"
                ids = rendered.token_ids
                assert isinstance(ids, np.ndarray), f"token_ids is a {type(ids).__name__}, not an array"
                assert ids.dtype == np.int64, f"token_ids is {ids.dtype}, not int64"
                assert ids.ndim == 1, f"token_ids has {ids.ndim} dimensions, not 1"
                rows = self._family().facts(model.source).vocab_size
                assert len(ids), "a prompt has no tokens"
                assert 0 <= ids.min() <= ids.max() < rows, f"{ids.tolist()} are not all below {rows}"
                assert model.case.text in rendered.text, f"{rendered.text!r} lacks the prompt {model.case.text!r}"
                shown = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
                assert model.case.text in shown, f"the ids stand for {shown!r}, which lacks {model.case.text!r}"
                for other in (renderer.prompt(prompt), self._renderer(tokenizer).prompt(prompt)):
                    assert other.text == rendered.text, "rendering a prompt again gives another text"
                    np.testing.assert_array_equal(other.token_ids, ids, "rendering a prompt again gives other ids")

    def test_prompts_are_independent(self, models: Sequence[BuiltModel]) -> None:
        """What was rendered before changes no later prompt, also if the caller overwrites what it got."""
        for model, tokenizer in self._tokenizers(models):
            used = self._renderer(tokenizer)
            texts = [model.case.text, model.case.text * 3, model.case.text]
            expected = [self._renderer(tokenizer).prompt(text).token_ids.copy() for text in texts]
            for text, ids in zip(texts, expected, strict=True):
                rendered = used.prompt(text)
                np.testing.assert_array_equal(rendered.token_ids, ids, f"{text!r} after other prompts")
                if rendered.token_ids.flags.writeable:
                    rendered.token_ids[:] = 0

    def test_conversations_are_read_only(self, models: Sequence[BuiltModel]) -> None:
        """Rendering changes no message of a prompt, a completion or a tool."""
        for model, tokenizer in self._tokenizers(models):
            renderer = self._family().renderer(tokenizer, system_prompt=self._system(tokenizer))
            for prompt in self._prompts(model, tokenizer):
                answer: Any = [{"role": "assistant", "content": model.case.text}]
                completion: Any = model.case.text if isinstance(prompt, str) else answer
                before = copy.deepcopy((prompt, completion))
                renderer.prompt(prompt)
                renderer.demonstration(prompt, completion)
                assert (prompt, completion) == before, (
                    f"rendering changed its arguments to {(prompt, completion)!r:.200}"
                )

    def test_an_empty_prompt_is_an_error_with_a_reason(self, models: Sequence[BuiltModel]) -> None:
        """Nothing to render, or a message without role or content, is a ``DataError`` in one line."""
        for _, tokenizer in self._tokenizers(models):
            renderer = self._family().renderer(tokenizer, apply_chat_template=False)
            chats: list[Any] = ["", [], [{}], [{"role": "user"}], [{"content": "abba"}], 7, None]
            for prompt in chats:
                with pytest.raises(DataError) as caught:
                    renderer.prompt(prompt)
                assert str(caught.value).strip(), f"the error for the prompt {prompt!r} gives no reason"
                assert "\n" not in str(caught.value), f"{str(caught.value)!r} has several lines"

    def test_a_conversation_needs_a_template(self, models: Sequence[BuiltModel]) -> None:
        """With a chat template a conversation is rendered, and its messages are kept; without one it is a
        ``DataError``.
        """
        for model, tokenizer in self._tokenizers(models):
            chat = [{"role": "user", "content": model.case.text}]
            renderer = self._renderer(tokenizer)
            if tokenizer.chat_template is None:
                with pytest.raises(DataError):
                    renderer.prompt(chat)
                continue
            rendered = renderer.prompt(chat)
            kept = [dict(message) for message in rendered.messages]
            assert kept == chat, f"the prompt's messages are {kept}, not {chat}"
            longer = [*chat, {"role": "assistant", "content": "abba"}, {"role": "user", "content": "baab"}]
            assert len(renderer.prompt(longer).token_ids) > len(rendered.token_ids), "further messages add no tokens"

    def test_the_system_prompt_comes_before_conversations(self, models: Sequence[BuiltModel]) -> None:
        """``system_prompt`` precedes a conversation without a system message, and replaces none."""
        for model, tokenizer in self._tokenizers(models):
            if tokenizer.chat_template is None:
                not_applicable("the tokenizer has no chat template")
            renderer = self._family().renderer(tokenizer, system_prompt=SYSTEM)
            user = {"role": "user", "content": model.case.text}
            rendered = renderer.prompt([user])
            assert SYSTEM in rendered.text, f"{rendered.text!r} lacks the system prompt"
            assert rendered.text.index(SYSTEM) < rendered.text.index(model.case.text), "the system prompt comes last"
            own = renderer.prompt([{"role": "system", "content": "Be brief."}, user])
            assert SYSTEM not in own.text, "the system prompt is added although the conversation has its own"

    def test_verbatim_text_stays_as_it_is(self, models: Sequence[BuiltModel]) -> None:
        """With ``apply_chat_template=False`` the rendered text is the prompt, unchanged."""
        for model, tokenizer in self._tokenizers(models):
            rendered = self._family().renderer(tokenizer, apply_chat_template=False).prompt(model.case.text)
            assert rendered.text == model.case.text, f"{model.case.text!r} is rendered as {rendered.text!r}"
            assert rendered.messages == (), f"a plain text has the messages {rendered.messages}"

    def test_a_demonstration_continues_its_prompt(self, models: Sequence[BuiltModel]) -> None:
        """A demonstration has the prompt that is sampled from, and completion tokens of the model of which at least one
        is imitated; nothing to imitate is a ``DataError``.
        """
        for model, tokenizer in self._tokenizers(models):
            renderer, rows = self._renderer(tokenizer), self._family().facts(model.source).vocab_size
            for prompt in self._prompts(model, tokenizer):
                shown = renderer.demonstration(prompt, model.case.text)
                assert isinstance(shown, RenderedDemonstration), f"demonstration returned {shown!r:.80}"
                expected = renderer.prompt(prompt).token_ids
                np.testing.assert_array_equal(
                    shown.prompt.token_ids, expected, "the prompt is not the one sampled from"
                )
                ids, mask = shown.completion_ids, shown.loss_mask
                assert ids.dtype == np.int64, f"completion_ids is {ids.dtype}, not int64"
                assert mask.dtype == np.bool_, f"loss_mask is {mask.dtype}, not bool"
                assert ids.shape == mask.shape == (len(ids),), f"ids {ids.shape} and loss mask {mask.shape}"
                assert mask.any(), "no token is imitated"
                assert 0 <= ids.min() <= ids.max() < rows, f"{ids.tolist()} are not all below {rows}"
                imitated = tokenizer.decode(ids[mask].tolist(), skip_special_tokens=True)
                assert model.case.text in imitated, f"what is imitated is {imitated!r}, without {model.case.text!r}"
                with pytest.raises(DataError):
                    renderer.demonstration(prompt, [])

    def test_a_demonstration_ends_as_a_completion_does(self, models: Sequence[BuiltModel]) -> None:
        """The last imitated token is one that ends a completion: the end of the turn, or of the sequence. Otherwise a
        model learns never to stop.
        """
        for model, tokenizer in self._tokenizers(models):
            renderer = self._renderer(tokenizer)
            ends = {renderer.end_of_turn_id, tokenizer.eos_token_id} - {None}
            shown = renderer.demonstration(model.case.text, model.case.text)
            last = int(shown.completion_ids[shown.loss_mask][-1])
            assert last in ends or not ends, f"a demonstration ends with token {last}; {sorted(ends)} end completions"

    @pytest.mark.parametrize("policy", POLICIES)
    def test_control_tokens_are_what_the_policy_says(
        self, policy: ControlTokenPolicy, models: Sequence[BuiltModel]
    ) -> None:
        """A control token that a prompt spells is text, the token itself, or an error, as ``control_tokens`` says; and
        ``spelled_control_tokens`` finds it, once.
        """
        tested = False
        for model, tokenizer in self._tokenizers(models):
            renderer = self._family().renderer(tokenizer, apply_chat_template=False, control_tokens=policy)
            assert renderer.spelled_control_tokens(model.case.text) == (), "an ordinary text spells control tokens"
            for token, added in tokenizer.added_tokens_decoder.items():
                if not added.special:
                    continue
                tested, spelled = True, f"{model.case.text}{added}{model.case.text}{added}"
                found = renderer.spelled_control_tokens(spelled, model.case.text)
                assert found == (str(added),), f"{spelled!r} spells {str(added)!r}, not {found}"
                if policy == "refuse":
                    with pytest.raises(DataError):
                        renderer.prompt(spelled)
                    continue
                ids = renderer.prompt(spelled).token_ids.tolist()
                count = ids.count(token) - renderer.prompt(model.case.text).token_ids.tolist().count(token)
                expected = 2 if policy == "special" else 0
                assert count == expected, f"{spelled!r} has {count} tokens {token}, not {expected}: policy {policy!r}"
        if not tested:
            not_applicable("the tokenizer has no control tokens")

    def test_a_text_that_is_too_long_is_refused_or_rendered(self, models: Sequence[BuiltModel]) -> None:
        """With ``max_tokens``, a longer text is rendered whole, or a ``TooLongError`` that says how long it is at
        least; a text that fits is rendered.
        """
        for model, tokenizer in self._tokenizers(models):
            whole = self._renderer(tokenizer).prompt(model.case.text)
            limited = self._family().renderer(tokenizer, max_tokens=len(whole.token_ids))
            np.testing.assert_array_equal(limited.prompt(model.case.text).token_ids, whole.token_ids)
            text = model.case.text * LONG
            length = len(self._renderer(tokenizer).prompt(text).token_ids)
            try:
                found = len(limited.prompt(text).token_ids)
            except TooLongError as error:
                said = error.at_least
                assert len(whole.token_ids) < said <= length, f"a text of {length} tokens has {said} or more, it says"
            else:
                assert found == length, f"a text of {length} tokens is rendered as {found}, not refused"

    # Internal methods

    def _tokenizers(self, models: Sequence[BuiltModel]) -> Iterator[tuple[BuiltModel, Any]]:
        for model in models:
            yield model, self._family().load_tokenizer(model.source)

    def _renderer(self, tokenizer: Any) -> PromptRenderer:
        return self._family().renderer(tokenizer)

    def _prompts(self, model: BuiltModel, tokenizer: Any) -> list[str | Sequence[Mapping[str, Any]]]:
        """A text and, if there is a chat template, a conversation."""
        chat = [{"role": "user", "content": model.case.text}]
        return [model.case.text, *([chat] if tokenizer.chat_template is not None else [])]

    def _system(self, tokenizer: Any) -> str | None:
        return SYSTEM if tokenizer.chat_template is not None else None
