"""What a dataset row becomes before anything runs: an example, and the draw that takes it into a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from chatlearn_core.types.pickling import pickled_by_position
from chatlearn_core.types.prompt import Prompt, TokenIds


class Example(Protocol):
    """What a dataset yields. Which kind an algorithm takes is its ``input``."""

    @property
    def id(self) -> str:
        """Unique over all datasets of a run, stable between runs of the same data."""

    @property
    def prompt(self) -> Prompt:
        """What the example begins with."""

    @property
    def num_tokens(self) -> int:
        """Of the longest sequence that it gives without a generator."""

    def content(self) -> Iterable[bytes]:
        """Whatever it holds beside id and tokens of its prompt: a checkpoint notices when it changes."""


@dataclass(slots=True, frozen=True, eq=False)
class Demonstration:
    """A prompt and what follows it, to imitate (supervised fine-tuning)."""

    prompt: Prompt
    completion_ids: TokenIds
    """[C] what follows the prompt, with the tokens that end the turns that are imitated."""
    loss_mask: npt.NDArray[np.bool_] | None = None
    """[C] True where the token is imitated; None: everywhere."""

    @property
    def id(self) -> str:
        """That of the prompt."""
        return self.prompt.id

    @property
    def num_tokens(self) -> int:
        """Of prompt and completion."""
        return len(self.prompt.token_ids) + len(self.completion_ids)

    def content(self) -> Iterable[bytes]:
        """See ``Example``."""
        yield self.completion_ids.tobytes()
        if self.loss_mask is not None:
            yield self.loss_mask.tobytes()


@dataclass(slots=True, frozen=True, eq=False)
class Answer:
    """One of the completions that a preference compares."""

    token_ids: TokenIds
    """[C] what follows the prompt, with the tokens that end it."""
    loss_mask: npt.NDArray[np.bool_] | None = None
    """[C] True where the token is the assistant's; None: everywhere."""


@dataclass(slots=True, frozen=True, eq=False)
class Preference:
    """Completions of one prompt, and which are better.

    Example: a pair is ``Preference(prompt, (chosen, rejected), ranks=(1.0, 0.0))``; a completion that people liked is
    ``Preference(prompt, (answer,), labels=(True,))``.
    """

    prompt: Prompt
    completions: tuple[Answer, ...]
    ranks: tuple[float, ...] = ()
    """One for each completion, larger is better."""
    labels: tuple[bool, ...] = ()
    """In place of ranks: whether each completion is good."""

    @property
    def id(self) -> str:
        """That of the prompt."""
        return self.prompt.id

    @property
    def num_tokens(self) -> int:
        """Of the prompt and the longest completion."""
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
    """Which draw of this example in the run, from 0; an evaluation's has its name, ``eval``."""
    seed_key: str
    """Keys the random numbers of the samples, unique among all draws of a run."""

    @property
    def group_id(self) -> str:
        """Id of the group of samples that this draw gives. It does not hold the step."""
        return f"{self.example.id}@{self.draw}"

    def sample_id(self, index: int) -> str:
        """Id of a sample of the group."""
        return f"{self.group_id}#{index}"

    def sample_key(self, index: int) -> str:
        """Keys the random numbers of a sample of the group."""
        return f"{self.seed_key}#{index}"


def evaluation_draw(example: Example) -> ExampleDraw:
    """The example as evaluations draw it: every time with the same random numbers, so that evaluations compare."""
    return ExampleDraw(example, "eval", f"{example.id}@eval")
