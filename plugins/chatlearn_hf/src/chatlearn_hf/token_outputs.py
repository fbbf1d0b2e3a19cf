"""The outputs that losses and flows request, computed from a trunk's last hidden states.

A trainer brings a trunk and the two heads, however it shards them; which rows are scored, where the results belong and
what is refused is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from torch import Tensor

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols import Head
from chatlearn_core.types import OutputRequest, Outputs, TrainBatch
from chatlearn_hf.varlen_attention import PackedLayout
from chatlearn_losses import TokenLogprobs, prediction_rows

HEAD_OUTPUTS: dict[Head, frozenset[str]] = {
    "lm": frozenset(
        {"logprobs", "entropy", "topk_ids", "topk_logprobs", "logprobs_at", "truncated_logprobs", "hidden_states"}
    ),
    "value": frozenset({"values", "hidden_states"}),
    "reward": frozenset({"scores", "hidden_states"}),
}
"""Outputs that a model with each head provides."""


@dataclass(slots=True, frozen=True)
class RequestedLogprobs:
    """What a language model's head computes for N rows."""

    temperature: float
    with_entropy: bool
    top_k: int
    """0 if the most likely tokens were not requested."""
    selected_ids: Tensor | None
    """[N, k]"""
    kept_ids: Tensor | None
    """[N, K]"""


ScoreHead = Callable[[Tensor], Tensor]
"""[N] float32 scores of hidden states [N, H], from a value or reward head."""
LogprobHead = Callable[[Tensor, Tensor, RequestedLogprobs], TokenLogprobs]
"""Logprobs of labels [N] after hidden states [N, H]."""


@dataclass(slots=True, frozen=True)
class TokenOutputs:
    """One request for outputs of T packed tokens.

    Args:
        names: outputs to compute.
        temperature: divides the logits.
        loss_mask: [T] bool; per-token outputs of other tokens are 0, and the head skips them. None selects every token
            but the first of each sequence.
        top_k: k of ``topk_ids`` and ``topk_logprobs``.
        selected_ids: [T, k] int64, the ids of ``logprobs_at``.
        kept_ids: [T, K] integers, the ids of ``truncated_logprobs``, -1 for unused entries.
    """

    names: Collection[str]
    temperature: float = 1.0
    loss_mask: Tensor | None = None
    top_k: int = 0
    selected_ids: Tensor | None = None
    kept_ids: Tensor | None = None

    @classmethod
    def requested(cls, request: OutputRequest, batch: TrainBatch) -> TokenOutputs:
        """Return the request of a batch, with the token data that its arguments name.

        Raises:
            BackendError: the batch lacks the token data.
        """

        def named(output: str, argument: str) -> Tensor | None:
            if output not in request.names:
                return None
            name = str(request.arguments.get(argument))
            if name not in batch.token_data:
                raise BackendError(
                    f"{output} reads the token data {name!r}, which the batch lacks; it has "
                    f"{', '.join(sorted(batch.token_data)) or 'none'}"
                )
            return batch.token_data[name]

        return cls(
            request.names,
            request.temperature,
            batch.loss_mask,
            int(request.arguments.get("k", 0)),
            named("logprobs_at", "ids"),
            named("truncated_logprobs", "kept"),
        )

    def check(self, head: Head, token_ids: Tensor, vocab_size: int) -> None:
        """Check the request against a head, the tokens [T] and the number of rows of the vocabulary.

        Raises:
            BackendError: the head does not provide an output, ``top_k`` exceeds the vocabulary, an id is outside it, or
                a token is not among its kept ids.
        """
        unknown = set(self.names) - HEAD_OUTPUTS[head]
        if unknown:
            raise BackendError(
                f"a model with head {head!r} cannot compute {', '.join(sorted(unknown))};"
                f" it provides {', '.join(sorted(HEAD_OUTPUTS[head]))}"
            )
        if self._wants_top and not 1 <= self.top_k <= vocab_size:
            raise BackendError(f"k is {self.top_k}, but must be between 1 and the vocabulary size {vocab_size}")
        if "logprobs_at" in self.names:
            if self.selected_ids is None:
                raise BackendError("logprobs_at was requested without the token ids")
            ids = self.selected_ids if self.loss_mask is None else self.selected_ids[self.loss_mask]
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                wrong = ids[(ids < 0) | (ids >= vocab_size)]
                raise BackendError(
                    f"logprobs_at was requested for token {int(wrong[0])}; the vocabulary has {vocab_size} tokens."
                    " Token ids of a teacher with another vocabulary have another meaning"
                )
        if "truncated_logprobs" in self.names:
            self._check_kept_ids(token_ids, vocab_size)

    def of_two_tokens(self) -> TokenOutputs:
        """Return the same request for two dummy tokens, which an empty row computes instead: a rank without work takes
        part in the collectives of sharded models.
        """

        def two(ids: Tensor | None) -> Tensor | None:
            return None if ids is None else ids.new_zeros(2, *ids.shape[1:])

        return replace(self, loss_mask=None, selected_ids=two(self.selected_ids), kept_ids=two(self.kept_ids))

    def of(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        layout: PackedLayout,
        score: ScoreHead,
        logprobs: LogprobHead,
    ) -> Outputs:
        """Return outputs by name, in float32, aligned as ``types.outputs`` states; ``hidden_states`` is [T, H].

        Args:
            hidden: [R, H] last hidden states of the computed rows, perhaps with rows of padding after them; of
                ranks that share a row, this rank's part of them.
            token_ids: [T] int64, S concatenated sequences.
            layout: layout of the same S sequences.
            score: head of ``values`` and ``scores``.
            logprobs: head of the other outputs.
        """
        names, sharing, num_tokens = self.names, layout.sharing, layout.num_tokens
        outputs: Outputs = {}
        if "hidden_states" in names:
            whole = layout.expand(hidden) if sharing is None else sharing.gather(hidden, num_tokens)
            outputs["hidden_states"] = whole[:num_tokens]
        if "scores" in names:
            last = layout.cu_seqlens[1:].long() - 1
            if sharing is None:
                outputs["scores"] = score(hidden[layout.rows_of(last)])
            else:
                outputs["scores"] = sharing.gather(score(hidden), num_tokens)[last]
        if not set(names) - {"hidden_states", "scores"}:
            return outputs
        # Shift before any split: the label of a rank's last row may be another rank's first token.
        rows, targets = prediction_rows(layout.cu_seqlens, self.loss_mask)
        own_rows, own_targets = layout.rows_of(rows), targets
        if sharing is not None:
            first = sharing.rank * hidden.shape[0]
            held = (rows >= first) & (rows < first + hidden.shape[0])
            own_rows, own_targets = rows[held] - first, targets[held]

        def aligned(values: Tensor) -> Tensor:
            """Scatter the values of this rank's rows into [T, ...]."""
            if sharing is not None:
                part = values.new_zeros(hidden.shape[0], *values.shape[1:]).index_copy(0, own_rows, values)
                values = sharing.gather(part, num_tokens).index_select(0, rows)
            return values.new_zeros(num_tokens, *values.shape[1:]).index_copy(0, targets, values)

        before = hidden.index_select(0, own_rows)
        if "values" in names:
            outputs["values"] = aligned(score(before))
            return outputs
        scored = logprobs(
            before,
            token_ids.index_select(0, own_targets),
            RequestedLogprobs(
                self.temperature,
                "entropy" in names,
                self.top_k if self._wants_top else 0,
                None if self.selected_ids is None else self.selected_ids.index_select(0, own_targets),
                None if self.kept_ids is None else self.kept_ids.index_select(0, own_targets),
            ),
        )
        found = {
            "logprobs": scored.logprobs,
            "entropy": scored.entropy,
            "topk_ids": scored.topk_ids,
            "topk_logprobs": scored.topk_logprobs,
            "logprobs_at": scored.selected,
            "truncated_logprobs": scored.truncated,
        }
        for name, values in found.items():
            if name in names and values is not None:
                outputs[name] = aligned(values)
        return outputs

    @property
    def _wants_top(self) -> bool:
        return not {"topk_ids", "topk_logprobs"}.isdisjoint(self.names)

    def _check_kept_ids(self, token_ids: Tensor, vocab_size: int) -> None:
        """Check that every token that is scored is among the ids that it was sampled from."""
        kept_ids = self.kept_ids
        if kept_ids is None:
            raise BackendError("truncated_logprobs was requested without the ids that the tokens were sampled from")
        wrong = ~(kept_ids == token_ids[:, None]).any(-1)
        if self.loss_mask is not None:
            wrong &= self.loss_mask
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise BackendError(
                f"truncated_logprobs was requested for token {int(token_ids[at])} (position {at} of the packed row), "
                f"which is not among the ids it was sampled from, {kept_ids[at][kept_ids[at] >= 0].tolist()[:16]}; "
                "only sampled tokens may be in the loss mask"
            )
        if kept_ids.numel() and int(kept_ids.max()) >= vocab_size:
            raise BackendError(
                f"truncated_logprobs was requested over token {int(kept_ids.max())}; the vocabulary has "
                f"{vocab_size} tokens"
            )
