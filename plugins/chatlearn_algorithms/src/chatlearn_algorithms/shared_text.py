"""The flow method ``trainer.text_logprobs``: what a teacher with another vocabulary says of the same text.

The teacher reads the conversation in its own chat template and the completion's text in its own tokens. Student and
teacher agree on the characters alone, so their logprobs are compared over spans of text: the shortest pieces that begin
and end with a token of each. Approximate likelihood matching (arXiv 2503.20083) compares such chunks, too; here their
log-ratio is the advantage of a policy gradient.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from chatlearn_algorithms.role_logprobs import role_logprobs
from chatlearn_chat.prompt_messages import messages_of
from chatlearn_chat.token_ends import UNFINISHED, decoded_lengths
from chatlearn_core.exceptions import DataError
from chatlearn_core.executor.scheduler import FlowCall
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import ModelSource
from chatlearn_core.protocols.prompt_renderer import PromptRenderer
from chatlearn_core.runtime.model_families import model_family
from chatlearn_core.runtime.plan import RolePlan
from chatlearn_core.types import Prompt, Sample

UNMATCHED = -1
"""In ``<teacher>_text_spans``: a sampled token in no span, which is not trained on."""


@dataclass(slots=True, frozen=True)
class Span:
    """Tokens [start, stop) of the student and [teacher_start, teacher_stop) of the teacher that spell the same text."""

    start: int
    stop: int
    teacher_start: int
    teacher_stop: int


def matched_spans(student: Sequence[int], teacher: Sequence[int], shared: int) -> list[Span]:
    """The shortest spans of whole tokens of both sides, in order.

    Args:
        student: for each token, the number of characters that are complete with it, ascending.
        teacher: the same for the teacher's tokens.
        shared: number of characters, from the start, in which the two texts are equal.
    """
    ours, theirs = _first_tokens(student), _first_tokens(teacher)
    spans: list[Span] = []
    start = teacher_start = 0
    for end in sorted(ours.keys() & theirs.keys()):
        if end <= shared:
            spans.append(Span(start, ours[end] + 1, teacher_start, theirs[end] + 1))
            start, teacher_start = ours[end] + 1, theirs[end] + 1
    return spans


def _first_tokens(ends: Sequence[int]) -> dict[int, int]:
    """Number of characters, from 1 -> the first token with which they are complete."""
    found: dict[int, int] = {}
    for index, end in enumerate(ends):
        if end:
            found.setdefault(end, index)
    return found


class ModelText:
    """Reads and writes text as one role's model does.

    Args:
        registry: has the model families.
        source: the role's model.
    """

    def __init__(self, registry: PluginRegistry, source: ModelSource) -> None:
        family = model_family(registry, source)
        longest = family.facts(source).max_length
        self.max_length = min(source.max_length or longest, longest)
        self.tokenizer: Any = family.load_tokenizer(source)
        self.renderer: PromptRenderer = family.renderer(self.tokenizer)
        self.verbatim: PromptRenderer = family.renderer(self.tokenizer, apply_chat_template=False)
        """For prompts that no chat template rendered."""
        self.special_ids = frozenset(
            index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special
        )
        turn, eos = self.renderer.end_of_turn_id, self.tokenizer.eos_token_id
        self.end_ids = frozenset(one for one in (turn, eos) if one is not None)
        self.end_id: int | None = eos if turn is None else turn
        """The token that ends a completion; None if there is no such token."""

    def prompt_ids(self, prompt: Prompt, student: PromptRenderer) -> list[int]:
        """The prompt of a run as this model reads it.

        Args:
            student: renders as the run's tokenizer does.

        Raises:
            DataError: the chat template refuses the messages.
        """
        messages = messages_of(prompt, student)
        rendered = self.verbatim.prompt(prompt.text) if messages is None else self.renderer.prompt(messages)
        return [int(one) for one in rendered.token_ids]


_texts: dict[ModelSource, ModelText] = {}
"""What was read of models' tokenizers, which takes a second and which every step needs."""
_reading = threading.Lock()  # fast tokenizers refuse to be used by two threads at a time


@dataclass(slots=True, frozen=True)
class Reading:
    """One completion in both vocabularies."""

    sequence: Sample
    """The prompt and the completion's text, in the teacher's tokens."""
    spans: Sequence[Span]
    """Counted from the first token after the prompt, on either side."""


def read_by(teacher: ModelText, student: ModelText, sample: Sample) -> Reading:
    """Encode a completion for the teacher, and find the spans of text that both sides write in whole tokens.

    A completion that ended itself has one span more: the token that ends a turn, on either side. A span is left out if
    the student has a control token inside it, or bytes that are no text.

    Args:
        sample: one turn, with plain ``token_ids``.

    Raises:
        DataError: the teacher cannot read it; has only the reason.
    """
    ids = [int(one) for one in sample.completion_ids]
    ended = bool(ids) and ids[-1] in student.end_ids and teacher.end_id is not None
    own = ids[:-1] if ended else ids
    text, ends = decoded_lengths(student.tokenizer, own, skip_special_tokens=True)
    theirs: list[int] = []
    if text:
        theirs = list(teacher.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
    read, teacher_ends = decoded_lengths(teacher.tokenizer, theirs, skip_special_tokens=False)
    shared = next((at for at, (a, b) in enumerate(zip(text, read, strict=False)) if a != b), min(len(text), len(read)))
    breaks = {index for index, token in enumerate(own) if token in student.special_ids}
    spans = [
        span
        for span in matched_spans(ends, teacher_ends, shared)
        if breaks.isdisjoint(range(span.start, span.stop))
        and UNFINISHED not in text[ends[span.start - 1] if span.start else 0 : ends[span.stop - 1]]
    ]
    if ended:
        if shared == len(text):
            spans.append(Span(len(own), len(ids), len(theirs), len(theirs) + 1))
        assert teacher.end_id is not None, "checked above"
        theirs.append(teacher.end_id)
    prompt = teacher.prompt_ids(sample.prompt, student.renderer)
    if len(prompt) + len(theirs) > teacher.max_length:
        raise DataError(f"it has {len(prompt) + len(theirs)} of its tokens, and it takes {teacher.max_length}")
    tokens = np.array([*prompt, *theirs], np.int64)
    mask = np.arange(len(tokens)) >= max(1, len(prompt))
    return Reading(Sample(sample.id, sample.group_id, sample.prompt, tokens, mask, len(prompt)), spans)


async def text_logprobs(call: FlowCall, requests: Sequence[RolloutRequest]) -> None:
    """Give each sample the teacher's logprob of each span, at the span's first token, and the number of each token's
    span, from 1. Tokens in no span leave the loss mask, and samples without a span are excluded.

    Raises:
        DataError: a sample has several turns.
        BackendError, ContractError: the role failed.
    """
    assert call.plan is not None, "a flow with a teacher runs in a planned run"
    roles, arguments = call.plan.roles, call.node.arguments
    present = [sample for request in requests for sample in request.samples if sample.loss_mask.any()]
    sources: Collection[str] | None = arguments.get("data_sources")
    taught = [sample for sample in present if sources is None or sample.prompt.data_source in sources]
    if several := next((sample for sample in taught if len(sample.turns) > 1), None):
        raise DataError(
            f"{call.node.source}: {call.node.name} takes completions of one turn, and sample {several.id!r} has "
            f"{len(several.turns)}. Use a teacher with the student's tokenizer, whose logprobs cover every turn"
        )
    values, spans_of = call.node.fields
    for sample in present:
        sample.token_data[values] = np.zeros(len(sample.token_ids), np.float32)
        sample.token_data[spans_of] = np.zeros(len(sample.token_ids), np.int64)
    if not taught:
        return
    plain = await call.runtime.data.aget(taught, {"token_ids"})
    read = await asyncio.to_thread(
        _readings, call.plan.registry, roles[call.node.role], roles[arguments["student"]], plain
    )
    readable = [(sample, one) for sample, one in zip(taught, read, strict=True) if isinstance(one, Reading)]
    for sample, reason in zip(taught, read, strict=True):
        if isinstance(reason, str):
            _leave_out(sample, f"unreadable_for_teacher: {call.node.role}: {reason}")
    if not readable:
        return
    logprobs = await role_logprobs(call, [reading.sequence for _, reading in readable])
    for (sample, reading), row in zip(readable, logprobs, strict=True):
        matched, numbers = _on_student(sample, reading, np.asarray(row, np.float64))
        sample.token_data[values], sample.token_data[spans_of] = matched, numbers
        if (numbers > 0).any():
            sample.loss_mask = numbers > 0
        else:
            _leave_out(sample, "no_shared_text")


def _readings(
    registry: PluginRegistry, teacher: RolePlan, student: RolePlan, samples: Sequence[Sample]
) -> list[Reading | str]:
    """Every sample as the teacher reads it, or the reason why it cannot."""
    found: list[Reading | str] = []
    with _reading:
        for role in (teacher, student):
            assert role.model is not None, "a trainer has a model"
            if role.model not in _texts:
                _texts[role.model] = ModelText(registry, role.model)
        theirs, ours = (_texts[role.model] for role in (teacher, student) if role.model is not None)
        for sample in samples:
            try:
                found.append(read_by(theirs, ours, sample))
            except DataError as error:
                found.append(str(error))
    return found


def _on_student(
    sample: Sample, reading: Reading, logprobs: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """[T] the teacher's logprob of a span at its first token, and [T] the number of each token's span."""
    mask = np.asarray(sample.loss_mask)
    values = np.zeros(len(mask), np.float32)
    numbers = np.where(mask, UNMATCHED, 0).astype(np.int64)
    start, teacher_start = sample.num_prompt_tokens, reading.sequence.num_prompt_tokens
    for number, span in enumerate(reading.spans, 1):
        here = slice(start + span.start, start + span.stop)
        if mask[here].all():
            numbers[here] = number
            values[here.start] = logprobs[teacher_start + span.teacher_start : teacher_start + span.teacher_stop].sum()
    return values, numbers


def _leave_out(sample: Sample, reason: str) -> None:
    sample.loss_mask = np.zeros_like(np.asarray(sample.loss_mask))
    if sample.exclusion is None:
        sample.exclusion = reason
