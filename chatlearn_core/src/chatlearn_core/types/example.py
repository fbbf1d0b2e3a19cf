"""Examples, which datasets make from rows, and draws, which samplers make from examples for a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from chatlearn_core.types.pickling import pickled_by_position
from chatlearn_core.types.prompt import Prompt, TokenIds


class Example(Protocol):
    """One item of a dataset. An algorithm's ``input`` names the kind of examples that it takes."""

    @property
    def id(self) -> str:
        """Unique over all datasets of a run; stable between runs on the same data."""

    @property
    def prompt(self) -> Prompt:
        """The prompt that the example begins with."""

    @property
    def num_tokens(self) -> int:
        """Length of the longest sequence that the example yields without a generator, tokens."""

    def content(self) -> Iterable[bytes]:
        """All content other than the id and the prompt's tokens; a checkpoint detects changes to it."""


@dataclass(slots=True, frozen=True, eq=False)
class Demonstration:
    """A prompt and a completion to imitate (supervised fine-tuning).

    Example: ``Demonstration(prompt, completion_ids=np.array([4, 2]))`` imitates both tokens.
    """

    prompt: Prompt
    completion_ids: TokenIds
    """[C] tokens after the prompt, including the tokens that end the imitated turns."""
    loss_mask: npt.NDArray[np.bool_] | None = None
    """[C] True where the token is imitated; None means everywhere."""

    @property
    def id(self) -> str:
        """That of the prompt."""
        return self.prompt.id

    @property
    def num_tokens(self) -> int:
        """Length of prompt and completion, tokens."""
        return len(self.prompt.token_ids) + len(self.completion_ids)

    def content(self) -> Iterable[bytes]:
        """See ``Example``."""
        yield self.completion_ids.tobytes()
        if self.loss_mask is not None:
            yield self.loss_mask.tobytes()


@dataclass(slots=True, frozen=True, eq=False)
class Answer:
    """One of the completions compared by a preference."""

    token_ids: TokenIds
    """[C] tokens after the prompt, including the token that ends the completion."""
    loss_mask: npt.NDArray[np.bool_] | None = None
    """[C] True where the token is the assistant's; None means everywhere."""


@dataclass(slots=True, frozen=True, eq=False)
class Preference:
    """Completions of one prompt with human or model judgements of them.

    Example: a pair is ``Preference(prompt, (chosen, rejected), ranks=(1.0, 0.0))``; a completion that people liked is
    ``Preference(prompt, (answer,), labels=(True,))``.
    """

    prompt: Prompt
    completions: tuple[Answer, ...]
    ranks: tuple[float, ...] = ()
    """One per completion; larger is better."""
    labels: tuple[bool, ...] = ()
    """Instead of ranks: whether each completion is good."""

    @property
    def id(self) -> str:
        """That of the prompt."""
        return self.prompt.id

    @property
    def num_tokens(self) -> int:
        """Length of the prompt and its longest completion, tokens."""
        return len(self.prompt.token_ids) + max(len(answer.token_ids) for answer in self.completions)

    def content(self) -> Iterable[bytes]:
        """See ``Example``."""
        for answer in self.completions:
            yield b"\0" + answer.token_ids.tobytes()
            if answer.loss_mask is not None:
                yield answer.loss_mask.tobytes()
        yield repr((self.ranks, self.labels)).encode()


@pickled_by_position
@dataclass(slots=True, frozen=True, eq=False)
class ExampleDraw:
    """An example as a sampler drew it.

    Example: the second draw of ``gsm8k/7`` has ``draw=1``; its samples are ``gsm8k/7@1#0``, ``gsm8k/7@1#1``, ...
    """

    example: Example
    draw: int | str
    """Number of this draw of the example in the run, from 0; evaluations use ``eval``, or ``eval:<set>``."""
    seed_key: str
    """Keys the random numbers of the samples; unique among all draws of a run."""

    @property
    def group_id(self) -> str:
        """Id of the group of samples made from this draw. Does not contain the step."""
        return f"{self.example.id}@{self.draw}"

    def sample_id(self, index: int) -> str:
        """Id of the group's sample ``index``."""
        return f"{self.group_id}#{index}"

    def sample_key(self, index: int) -> str:
        """Key of the random numbers of the group's sample ``index``."""
        return f"{self.seed_key}#{index}"


def evaluation_draw(example: Example, evaluation_set: str = "") -> ExampleDraw:
    """The draw that evaluations use: always the same random numbers, so that evaluations are comparable.

    Args:
        evaluation_set: name of the evaluation set; an example may be in several.
    """
    name = f"eval:{evaluation_set}" if evaluation_set else "eval"
    return ExampleDraw(example, name, f"{example.id}@{name}")
