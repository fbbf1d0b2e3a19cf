"""The decode loop, one step at a time: admit, prefill or decode, sample, retire.

A step is a deterministic function of the requests submitted before it, in submission order. It either starts waiting
sequences (prefill) or gives every running one a token (decode). Python handles single sequences only when they end,
stream or watch for stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types import Completion, FinishReason
from chatlearn_transformers.row_decoder import Ids, RowDecoder
from chatlearn_transformers.sampling import SamplingPlan, sample, seed_word, uniforms
from chatlearn_transformers.sequence_request import SequenceRequest
from chatlearn_transformers.slots import SlotTable
from chatlearn_transformers.stopping import StopStrings, token_table

_MAX_PADDING = 0.75
"""A prompt joins a prefill batch if it has at least this fraction of the longest prompt's length..."""
_SMALL_PREFILL = 1024
"""...or while the batch has fewer tokens than this, because another forward would cost more than the padding."""
_ADMIT_FRACTION = 8
"""Waiting sequences are admitted once 1/8 of the slots are free, so that one prefill serves many."""


@dataclass(slots=True, frozen=True)
class Limits:
    """Limits of a step."""

    max_num_sequences: int
    max_prefill_tokens: int
    max_kv_bytes: float = float("inf")
    share_prefixes: bool = True


@dataclass(slots=True)
class StepReport:
    """Result of a step."""

    finished: list[tuple[SequenceRequest, Completion]] = field(default_factory=list)
    progress: list[tuple[SequenceRequest, int, list[int]]] = field(default_factory=list)
    """(request, position, new tokens) of streaming sequences."""


class Scheduler:
    """Waiting and running sequences of one replica. Not thread-safe: only one caller at a time."""

    def __init__(
        self,
        decoder: RowDecoder,
        limits: Limits,
        eos_ids: Collection[int],
        decode_text: Callable[[Sequence[Sequence[int]], bool], list[str]],
    ) -> None:
        """Start without requests. Args: decode_text: (batch of token ids, whether to skip special tokens) -> texts."""
        self.policy_version = 0
        self._decoder = decoder
        self._limits = limits
        self._is_eos = token_table(eos_ids, decoder.vocab_size)
        self._decode_text = decode_text
        self._waiting: deque[SequenceRequest] = deque()
        self._running: list[SequenceRequest] = []
        self._slots = SlotTable()
        self._kv_valid = True
        self._plan: SamplingPlan | None = None
        self._observed: list[int] = []
        """Rows that stream or watch for stop strings."""

    @property
    def num_running(self) -> int:
        """Number of sequences in a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences waiting for a slot."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._waiting or self._running)

    def submit(self, requests: Iterable[SequenceRequest]) -> None:
        """Queue requests, in order."""
        for pending in requests:
            if pending.request.sampling.stop:
                pending.watcher = StopStrings(
                    pending.request.sampling.stop, lambda ids: self._decode_text([ids], False)[0]
                )
                if pending.prior is not None:
                    for token_id in pending.prior.token_ids.tolist():
                        pending.watcher.feed(token_id)
            self._waiting.append(pending)

    def step(self) -> StepReport:
        """Run one batch of prefills if any may start, otherwise compute one token for every running sequence."""
        report = StepReport()
        if not self._kv_valid:
            self._recompute()
        admitted = self._admit()
        if admitted:
            self._start(admitted, report)
        elif self._running:
            self._advance(report)
        return report

    def take_out(self, requests: Collection[SequenceRequest] | None = None) -> list[tuple[SequenceRequest, Completion]]:
        """Remove waiting or running sequences (None: all) and return each with its partial completion, reason
        ``abort``.
        """
        out: list[tuple[SequenceRequest, Completion]] = []
        wanted = None if requests is None else set(requests)
        rows = [row for row, pending in enumerate(self._running) if wanted is None or pending in wanted]
        self._retire(rows, dict.fromkeys(rows, "abort"), out)
        staying: deque[SequenceRequest] = deque()
        for pending in self._waiting:
            if wanted is None or pending in wanted:
                out.append((pending, pending.unstarted()))
            else:
                staying.append(pending)
        self._waiting = staying
        return out

    def set_version(self, version: int, *, recompute: bool) -> None:
        """Sample under ``version`` from now on; ``recompute`` discards the KV cache, because it belongs to other
        weights.
        """
        if version != self.policy_version:
            for row, pending in enumerate(self._running):
                pending.spans.append((int(self._slots.counts[row]), version))
        self.policy_version = version
        if recompute:
            self.drop_kv_cache()

    def drop_kv_cache(self) -> None:
        """Free the KV cache; running sequences recompute it before their next token."""
        self._decoder.cache.clear()
        self._kv_valid = not self._running

    def _admit(self) -> list[SequenceRequest]:
        """Take requests that fit from the head of the queue, if enough slots are free."""
        limits = self._limits
        free = limits.max_num_sequences - len(self._running)
        enough = min(len(self._waiting), max(1, limits.max_num_sequences // _ADMIT_FRACTION))
        if not self._waiting or free < enough:
            return []
        admitted: list[SequenceRequest] = []
        seen: set[bytes] = set()
        tokens = 0
        longest = max((pending.max_length for pending in self._running), default=0)
        while self._waiting and len(admitted) < free:
            pending = self._waiting[0]
            context = pending.context()
            key = context.tobytes()
            new_tokens = 0 if key in seen and limits.share_prefixes else len(context)
            longest = max(longest, pending.max_length)
            num_after = len(self._running) + len(admitted) + 1
            too_big = num_after * longest * self._decoder.kv_bytes_per_token > limits.max_kv_bytes and num_after > 1
            if too_big or (admitted and tokens + new_tokens > limits.max_prefill_tokens):
                break
            seen.add(key)
            tokens += new_tokens
            admitted.append(self._waiting.popleft())
        return admitted

    def _start(self, admitted: list[SequenceRequest], report: StepReport) -> None:
        """Assign slots to sequences, compute their contexts, and sample the first token of each."""
        first = len(self._running)
        # The sort is stable: equal lengths stay in submission order.
        admitted = sorted(admitted, key=lambda pending: -len(pending.request.prompt_ids) - pending.num_prior)
        contexts = [pending.context() for pending in admitted]
        self._assign_slots(admitted, contexts)
        logits = self._prefill(contexts, first)
        for index, pending in enumerate(admitted):
            pending.spans = [(pending.num_prior, self.policy_version)]
            self._slots.lengths[first + index] = len(contexts[index])
        self._take_tokens(logits, first, report)

    def _assign_slots(self, admitted: list[SequenceRequest], contexts: list[Ids]) -> None:
        slots, first = self._slots, len(self._running)
        slots.reserve(
            first + len(admitted),
            max(pending.request.sampling.max_tokens for pending in admitted),
            max(len(pending.request.sampling.stop_token_ids) for pending in admitted),
        )
        self._decoder.cache.reserve(
            first + len(admitted),
            max(len(context) for context in contexts) + 1,
            max(pending.max_length for pending in admitted),
        )
        rows = slice(first, first + len(admitted))
        sampling = [pending.request.sampling for pending in admitted]
        slots.counts[rows] = [pending.num_prior for pending in admitted]
        slots.limits[rows] = [params.max_tokens for params in sampling]
        slots.seeds[rows] = np.array([seed_word(params.seed) for params in sampling], dtype=np.uint64)
        slots.temperature[rows] = [params.temperature for params in sampling]
        slots.top_p[rows] = [params.top_p for params in sampling]
        slots.top_k[rows] = [params.top_k for params in sampling]
        slots.stops_at_eos[rows] = [not params.ignore_eos for params in sampling]
        slots.stop_ids[rows] = -1
        for row, pending in enumerate(admitted, start=first):
            extra = pending.request.sampling.stop_token_ids
            slots.stop_ids[row, : len(extra)] = extra
            if pending.prior is not None:
                slots.token_ids[row, : pending.num_prior] = pending.prior.token_ids
                slots.logprobs[row, : pending.num_prior] = pending.prior.logprobs
                if pending.prior.raw_logprobs is not None:
                    slots.raw_logprobs[row, : pending.num_prior] = pending.prior.raw_logprobs
        self._running.extend(admitted)
        self._composition_changed()

    def _prefill(self, contexts: list[Ids], first: int) -> torch.Tensor:
        """Compute contexts, longest first, into rows from ``first`` on; return logits [R, V] after each."""
        logits: list[torch.Tensor] = []
        start = 0
        while start < len(contexts):
            unique: list[Ids] = []
            index_of: dict[bytes, int] = {}
            sources: list[int] = []
            longest = len(contexts[start])
            for offset, context in enumerate(contexts[start:]):
                key = context.tobytes()
                known = index_of.get(key) if self._limits.share_prefixes else None
                if known is None:
                    num_tokens = (len(unique) + 1) * longest
                    padded_much = len(context) < _MAX_PADDING * longest and num_tokens > _SMALL_PREFILL
                    if unique and (padded_much or num_tokens > self._limits.max_prefill_tokens):
                        break
                    known = index_of[key] = len(unique)
                    unique.append(context)
                else:
                    pending = self._running[first + start + offset]
                    pending.num_cached_tokens = len(pending.request.prompt_ids)
                sources.append(known)
            logits.append(self._decoder.prefill(unique, np.array(sources), first + start))
            start += len(sources)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _recompute(self) -> None:
        """Recompute the KV cache of every running sequence: all tokens but the last, which the next step computes."""
        if self._running:
            slots = self._slots
            contexts = [
                np.concatenate([pending.request.prompt_ids, slots.token_ids[row, : slots.counts[row] - 1]])
                for row, pending in enumerate(self._running)
            ]
            order = sorted(range(len(contexts)), key=lambda row: -len(contexts[row]))
            self._reorder(np.array(order))
            cached = [pending.num_cached_tokens for pending in self._running]
            self._prefill([contexts[row] for row in order], 0)
            for pending, before in zip(self._running, cached, strict=True):
                pending.num_cached_tokens = before
        self._kv_valid = True

    def _advance(self, report: StepReport) -> None:
        """Compute one token for every running sequence."""
        slots, count = self._slots, len(self._running)
        last = slots.token_ids[np.arange(count), slots.counts[:count] - 1]
        logits = self._decoder.decode(last, slots.lengths[:count])
        slots.lengths[:count] += 1
        self._take_tokens(logits, 0, report)

    def _take_tokens(self, logits: torch.Tensor, first: int, report: StepReport) -> None:
        """Sample one token for rows ``first``.. from their logits, record it, and retire finished sequences."""
        slots, stop = self._slots, len(self._running)
        rows = np.arange(first, stop)
        counts = slots.counts[first:stop]
        numbers = torch.from_numpy(uniforms(slots.seeds[first:stop], counts)).to(logits.device)
        with torch.inference_mode():
            drawn = sample(logits, self._sampling_plan(first), numbers)
        tokens = drawn.token_ids.cpu().numpy()
        logprobs, raw_logprobs = drawn.logprobs.cpu().numpy(), drawn.raw_logprobs.cpu().numpy()
        if not (np.isfinite(logprobs).all() and np.isfinite(raw_logprobs).all()):
            bad = [self._running[row].request.id for row in rows[~np.isfinite(logprobs + raw_logprobs)][:3]]
            raise BackendError(
                f"the model's logits are not finite for {', '.join(map(repr, bad))} (policy version "
                f"{self.policy_version}); its weights have overflowed or are damaged"
            )
        slots.token_ids[rows, counts] = tokens
        slots.logprobs[rows, counts] = logprobs
        slots.raw_logprobs[rows, counts] = raw_logprobs
        slots.counts[first:stop] += 1
        if drawn.kept_ids is not None:
            self._keep_ids(first, drawn.kept_ids.cpu().numpy().astype(np.int32))

        stopped = self._is_eos[tokens] & slots.stops_at_eos[first:stop]
        if slots.stop_ids.shape[1]:
            stopped |= (slots.stop_ids[first:stop] == tokens[:, None]).any(axis=1)
        for row in self._observed:
            if row >= first:
                self._observe(row, int(tokens[row - first]), stopped, first, report)
        full = slots.counts[first:stop] >= slots.limits[first:stop]
        ended = np.flatnonzero(stopped | full)
        if ended.size:
            reasons: dict[int, FinishReason] = {
                int(index) + first: "stop" if stopped[index] else "length" for index in ended
            }
            self._retire(sorted(reasons), reasons, report.finished)

    def _keep_ids(self, first: int, kept_ids: npt.NDArray[np.int32]) -> None:
        """Note the ids [R, K] that the tokens of rows ``first``.. were sampled from, -1 for unused entries."""
        for pending, ids in zip(self._running[first:], kept_ids, strict=True):
            if pending.request.sampling.max_kept_ids and not pending.future.done():
                problem = pending.keep_ids(ids[ids >= 0])
                if problem is not None:
                    pending.fail(BackendError(f"request {pending.request.id!r} failed: {problem}"))

    def _observe(self, row: int, token_id: int, stopped: np.ndarray, first: int, report: StepReport) -> None:
        pending = self._running[row]
        if pending.on_tokens is not None:
            report.progress.append((pending, int(self._slots.counts[row]) - 1, [token_id]))
        if pending.watcher is not None and pending.watcher.feed(token_id):
            stopped[row - first] = True

    def _retire(
        self, rows: list[int], reasons: dict[int, FinishReason], out: list[tuple[SequenceRequest, Completion]]
    ) -> None:
        """Remove rows and move the last rows into the gaps, so that running rows stay 0..n-1."""
        if not rows:
            return
        slots = self._slots
        out.extend(self._completions(rows, reasons))
        gone = set(rows)
        remaining = len(self._running) - len(rows)
        targets = [row for row in rows if row < remaining]
        sources = [row for row in range(remaining, len(self._running)) if row not in gone]
        if targets:
            source_rows, target_rows = np.array(sources), np.array(targets)
            if self._kv_valid:
                self._decoder.move_rows(source_rows, target_rows, int(slots.lengths[source_rows].max()))
            slots.move(source_rows, target_rows)
            for source, target in zip(sources, targets, strict=True):
                self._running[target] = self._running[source]
        del self._running[remaining:]
        self._kv_valid = self._kv_valid or not self._running
        self._composition_changed()

    def _completions(
        self, rows: list[int], reasons: dict[int, FinishReason]
    ) -> list[tuple[SequenceRequest, Completion]]:
        """Copy the completions out of these rows."""
        slots = self._slots
        histories = [slots.token_ids[row, : slots.counts[row]].copy() for row in rows]
        texts = self._decode_text([token_ids.tolist() for token_ids in histories], True)
        found: list[tuple[SequenceRequest, Completion]] = []
        for row, token_ids, text in zip(rows, histories, texts, strict=True):
            count = len(token_ids)
            logprobs = slots.logprobs[row, :count].copy()
            raw_logprobs = slots.raw_logprobs[row, :count].copy()
            pending = self._running[row]
            found.append((pending, pending.sampled(token_ids, logprobs, raw_logprobs, reasons[row], text)))
        return found

    def _reorder(self, order: Ids) -> None:
        """Move row ``order[i]`` to i in everything except the KV cache."""
        self._slots.move(order, np.arange(len(order)))
        self._running = [self._running[row] for row in order]
        self._composition_changed()

    def _composition_changed(self) -> None:
        self._plan = None
        self._observed = [
            row
            for row, pending in enumerate(self._running)
            if pending.watcher is not None or pending.on_tokens is not None
        ]

    def _sampling_plan(self, first: int) -> SamplingPlan:
        """Return the plan of rows ``first``..; it is cached while the composition does not change."""
        if first == 0 and self._plan is not None:
            return self._plan
        slots, stop = self._slots, len(self._running)
        plan = SamplingPlan.build(
            slots.temperature[first:stop],
            slots.top_p[first:stop],
            slots.top_k[first:stop],
            self._decoder.vocab_size,
            self._decoder.device,
            max(pending.request.sampling.max_kept_ids for pending in self._running[first:stop]),
        )
        if first == 0:
            self._plan = plan
        return plan
