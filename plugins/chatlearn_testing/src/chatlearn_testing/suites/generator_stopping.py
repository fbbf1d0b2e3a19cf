"""The contract of where a completion ends: end of sequence, stop tokens, stop strings, lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types import Completion
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.generator_fixtures import (
    FEW_TOKENS,
    INCOMPLETE,
    MODEL_LENGTH,
    PROMPTS,
    GeneratorFixtures,
    Replica,
    ask,
    assert_completion,
    plain_greedy,
    spanning_stop,
    text_by_length,
)

NEVER = "no such text"


class StoppingContract(GeneratorFixtures, ConformanceSuite):
    """The part of ``GeneratorConformance`` about the end of a completion."""

    def test_the_end_of_sequence_ends_a_completion(
        self, replica: Replica, reference: torch.nn.Module, model_directory: Path
    ) -> None:
        """A completion ends with the end-of-sequence token, which is part of it, for the reason ``stop``; with
        ``ignore_eos`` it goes on. Stop tokens hold in both cases.
        """
        ends = end_tokens(model_directory)
        if not ends:
            not_applicable("config.json of the model directory names no eos_token_id")
        prompt, whole = ending_prompt(reference, ends)
        count = next(i for i, token in enumerate(whole, 1) if token in ends)
        greedy = plain_greedy(reference, PROMPTS[0])
        unused, stop = next(token for token in range(FEW_TOKENS) if token not in greedy), greedy[2]
        requests = [
            ask("ends", prompt, ignore_eos=False),
            ask("ends-at-the-limit", prompt, ignore_eos=False, max_tokens=count),
            ask("goes-on", prompt),
            ask("stop-token", ignore_eos=False, stop_token_ids=(unused, stop)),
        ]
        *ended, on, stopped = completions = replica.ask(*requests)
        for request, completion in zip(requests, completions, strict=True):
            assert_completion(reference, request, completion)
        for completion in ended:
            assert completion.token_ids.tolist() == whole[:count], f"{completion.request_id}: ends elsewhere"
            assert completion.finish_reason == "stop", completion.request_id
        assert (on.token_ids.tolist(), on.finish_reason) == (whole, "length"), "ignore_eos is ignored"
        first = min(greedy.index(token) for token in {stop, *ends} & set(greedy))
        assert (stopped.token_ids.tolist(), stopped.finish_reason) == (greedy[: first + 1], "stop")

    def test_stop_strings_may_span_tokens(self, replica: Replica, reference: torch.nn.Module) -> None:
        """A stop string that begins in one token and ends in the next ends the completion with the latter; each of
        several stop strings counts.

        The completion goes on: stop strings are looked for in single tokens.
        """
        spanning = spanning_stop(replica)
        requests = [
            ask("spanning", spanning.prompt, stop=(spanning.text,)),
            ask("second-of-two", spanning.prompt, stop=(NEVER, spanning.text)),
            ask("first-of-two", spanning.prompt, stop=(spanning.text, NEVER)),
            ask("at-the-limit", spanning.prompt, stop=(spanning.text,), max_tokens=spanning.count),
        ]
        for request, completion in zip(requests, replica.ask(*requests), strict=True):
            expected = spanning.whole.token_ids[: spanning.count].tolist()
            assert completion.token_ids.tolist() == expected, (
                f"{request.id}: stop string {spanning.text!r}, text {completion.text!r}"
            )
            assert completion.finish_reason == "stop", request.id
            assert spanning.text in completion.text, f"{request.id}: {completion.text!r} lacks its stop string"
            assert_completion(reference, request, completion)

    def test_text_and_stop_strings_are_of_the_completion_alone(self, replica: Replica) -> None:
        """Text in the prompt, or across its end, is no stop string of the completion, nor is a letter of another case;
        ``text`` is that of the completion's tokens alone.
        """
        for prompt in PROMPTS:
            *shorter, whole = text_by_length(replica, prompt)
            for head in shorter[2:-2]:
                rest = whole.text.removeprefix(head.text)
                absent = [c for c in head.text if c.isascii() and c.isalnum() and c not in rest]
                between_characters = rest != whole.text and INCOMPLETE not in (head.text[-1:], rest[:1])
                if head.text and rest and between_characters and absent:
                    self._assert_text_of_completion(replica, (*prompt, *head.token_ids.tolist()), head, whole)
                    return
        not_applicable("no greedy completion of the suite's prompts has text that allows the test")

    def _assert_text_of_completion(
        self, replica: Replica, prompt: tuple[int, ...], head: Completion, whole: Completion
    ) -> None:
        rest = whole.text.removeprefix(head.text)
        inside = next(c for c in reversed(head.text) if c.isascii() and c.isalnum() and c not in rest)
        stops = [inside, head.text[-1] + rest[0], *(c.swapcase() for c in rest if c.isascii() and c.isalpha())]
        num_tokens = len(whole.token_ids) - len(head.token_ids)
        requests = [ask("rest", prompt, max_tokens=num_tokens)]
        requests += [
            ask(f"not-{i}", prompt, max_tokens=num_tokens, stop=(stop,))
            for i, stop in enumerate(stops[:4])
            if stop not in rest
        ]
        for completion in replica.ask(*requests):
            assert completion.token_ids.tolist() == whole.token_ids[len(head.token_ids) :].tolist(), (
                f"{completion.sampling.stop} is not in {rest!r}, but ended it; the prompt ends with {head.text!r}"
            )
            assert completion.finish_reason == "length"
            # Decoders may drop a leading space, and show parts of characters in several ways.
            texts = ["".join(text.replace(INCOMPLETE, "").split()) for text in (completion.text, rest)]
            assert texts[0] == texts[1], f"text {completion.text!r}, but the tokens are those of {rest!r}"

    def test_lengths_are_exact(self, replica: Replica, reference: torch.nn.Module) -> None:
        """Prompt and ``max_tokens`` together may have exactly the model's length; one token more is refused.

        Other tokens after a long prompt: a part of it is lost.
        """
        prompt = [(7 * i + 3) % FEW_TOKENS for i in range(MODEL_LENGTH - 1)]
        requests = [
            ask("fits", prompt[: MODEL_LENGTH - 5], max_tokens=5),
            ask("last", prompt, max_tokens=1),
            ask("half", prompt[: MODEL_LENGTH // 2]),
        ]
        for request, completion in zip(requests, replica.ask(*requests), strict=True):
            count = request.sampling.max_tokens
            expected = plain_greedy(reference, request.prompt_ids.tolist(), count)
            assert (completion.token_ids.tolist(), completion.finish_reason) == (expected, "length"), request.id
            assert_completion(reference, request, completion)
        with pytest.raises(BackendError) as caught:
            replica.ask(ask("one-too-long", prompt[: MODEL_LENGTH - 5], max_tokens=6))
        assert "one-too-long" in str(caught.value), f"does not name the request: {caught.value}"


def end_tokens(model_directory: Path) -> set[int]:
    """Return the end-of-sequence ids of the model directory's configurations."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (file := model_directory / name).exists():
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            found |= set() if value is None else {*value} if isinstance(value, list) else {value}
    return found


def ending_prompt(reference: torch.nn.Module, ends: set[int]) -> tuple[list[int], list[int]]:
    """Return a prompt whose greedy completion has an end-of-sequence token within ``NUM_TOKENS``, and its tokens; if
    possible one that does not begin with it.
    """
    random = torch.Generator().manual_seed(0)
    at_once: list[list[int]] = []
    for _ in range(40):
        tokens = torch.randint(0, FEW_TOKENS, (32,), generator=random)
        whole = plain_greedy(reference, tokens[:4].tolist())
        if ends & set(whole) and whole[0] not in ends:
            return tokens[:4].tolist(), whole
        with torch.no_grad():
            likely = reference(tokens).argmax(-1).tolist()
        at_once += [tokens[:length].tolist() for length, token in enumerate(likely, 1) if token in ends]
    if not at_once:
        not_applicable("the suite found no prompt after which the model ends the sequence")
    return at_once[0], plain_greedy(reference, at_once[0])
