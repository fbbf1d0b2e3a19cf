"""Kinds of examples: how rows become examples, and which samples an example yields without a generator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from chatlearn_core.data.format import Content, DatasetFormat, RawExample
from chatlearn_core.exceptions import DataError
from chatlearn_core.protocols.prompt_renderer import PromptRenderer, RenderedDemonstration, RenderedPrompt
from chatlearn_core.types import Example, ExampleDraw, Prompt, Sample


class ExampleKind(Protocol):
    """Built as ``factory()`` from an ``ExampleKindSpec``; pure and stateless. An algorithm names one as its ``input``.

    Example:
        class Rewrites:
            def build(self, raw, row):
                shown = row.rendered(raw, raw.columns["rewritten"])
                return Demonstration(row.prompt(raw, shown.prompt), shown.completion_ids)

            def samples(self, draw):
                return [sample_from_tokens(draw, 0, draw.example.completion_ids)]
    """

    def build(self, raw: RawExample, row: RowRenderer) -> Example:
        """The example of a row.

        Called: for each row of a file; in the driver; once per row.

        Raises:
            DataError: the row cannot be used; give only the reason, because the pipeline adds file and line.
        """

    def samples(self, draw: ExampleDraw) -> list[Sample]:
        """The samples of a draw, in id order; empty if a generator makes them.

        Called: for each draw; in the driver; once per draw.
        """


@dataclass(slots=True)
class RowRenderer:
    """Renders one row with the run's rendering settings."""

    renderer: PromptRenderer
    format: DatasetFormat
    where: str
    """The configuration key of the dataset."""
    id: str
    """Id of the row."""
    data_source: str
    spelled: list[str] = field(default_factory=list)
    """Control tokens spelled out in the rendered texts."""

    def prompt(self, raw: RawExample, rendered: RenderedPrompt | None = None) -> Prompt:
        """The row's prompt.

        Args:
            rendered: the rendered prompt; by default rendered for generation.
        """
        if rendered is None:
            self._note(raw)
            rendered = self.renderer.prompt(raw.prompt, raw.tools)
        return Prompt(
            id=self.id,
            token_ids=rendered.token_ids,
            text=rendered.text,
            data_source=self.data_source,
            ground_truth=raw.ground_truth,
            messages=rendered.messages,
            columns=raw.columns,
            media=tuple(raw.media),
        )

    def rendered(self, raw: RawExample, completion: Content) -> RenderedDemonstration:
        """The row's prompt followed by a completion, rendered by the chat template."""
        self._note(raw, completion)
        return self.renderer.demonstration(raw.prompt, completion, tools=raw.tools, imitates_prompt=raw.imitates_prompt)

    def require_answer(self, raw: RawExample) -> None:
        """Raises DataError if the format's rewards need an answer and the row has none."""
        if raw.ground_truth is None and self.format.answer_required:
            raise DataError(
                f"no answer (looked in: {', '.join(self.format.answer_columns)}); if no reward needs one, "
                f"set {self.where}.options.answer=optional"
            )

    def _note(self, raw: RawExample, completion: Content | None = None) -> None:
        self.spelled.extend(self.renderer.spelled_control_tokens(raw.prompt, completion, raw.tools))
