"""Runs packed sequences through a transformers model and computes the outputs that losses and flows request."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from chatlearn_core.exceptions import BackendError, ModelError
from chatlearn_core.protocols import Head
from chatlearn_core.types import OutputRequest, Outputs, TrainBatch
from chatlearn_hf.own_head import own_head, trunk_of
from chatlearn_hf.sequence_rope import give_each_sequence_its_rope
from chatlearn_hf.varlen_attention import VARLEN_ATTENTION, PackedLayout
from chatlearn_losses import prediction_rows, token_logprobs_from_hidden

HEAD_OUTPUTS: dict[Head, frozenset[str]] = {
    "lm": frozenset(
        {"logprobs", "entropy", "topk_ids", "topk_logprobs", "logprobs_at", "truncated_logprobs", "hidden_states"}
    ),
    "value": frozenset({"values", "hidden_states"}),
    "reward": frozenset({"scores", "hidden_states"}),
}
"""Outputs that a model with each head provides."""

Rows = Literal["packed", "padded"]
"""How sequences pass through the trunk: concatenated in one row, or each in its own right-padded row."""

MAX_LOGITS_ELEMENTS = 1 << 25
"""Default number of logits (tokens x vocabulary) held at once, 128 MiB in float32. Logits that fit into one chunk are
kept for the backward pass; otherwise they are recomputed there."""


class PackedModel(nn.Module):
    """A transformers model with a head whose forward pass takes packed tokens and returns aligned outputs.

    A trainer wraps this unit (FSDP, compile): trunk, head and token outputs run inside one ``forward``. Checkpoint
    names are those of ``self.model``.

    Args:
        model: from ``load_model``; its attention must be ``chatlearn_varlen``, ``sdpa``, ``eager`` or a flash
            attention of transformers.
        head: the model's head.
        logits_chunk_tokens: number of tokens whose logits are held at once; None derives it from
            ``MAX_LOGITS_ELEMENTS``.

    Attributes:
        rows: ``packed``, or ``padded`` for trunks that would mix the sequences of one row; ``padded`` does not work
            with ``chatlearn_varlen``. See ``forward_check.ForwardCheck.choose``.
    """

    def __init__(self, model: PreTrainedModel, head: Head = "lm", logits_chunk_tokens: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.head: Head = head
        self.logits_chunk_tokens = logits_chunk_tokens
        self.rows: Rows = "packed"
        self.has_sequence_rope = give_each_sequence_its_rope(model)

    @property
    def takes_shared_rows(self) -> bool:
        """Whether several sequences with equal beginnings may share computed rows."""
        is_varlen = self.model.config._attn_implementation == VARLEN_ATTENTION
        # A length-dependent rotary embedding differs between sequences with equal beginnings.
        return self.rows == "packed" and is_varlen and not self.has_sequence_rope

    def hidden_states(self, token_ids: Tensor, layout: PackedLayout) -> Tensor:
        """Return the last hidden states (after the final norm) [T, H] of packed ``token_ids`` [T].

        Under Ulysses (``layout.ulysses``) every rank passes the whole row and gets the states of its part.
        """
        return layout.expand(self._trunk(token_ids, layout))

    def _trunk(self, token_ids: Tensor, layout: PackedLayout) -> Tensor:
        """Return the last hidden states of the computed rows, [R, H]."""
        attention = self.model.config._attn_implementation
        if layout.row_of_token is not None and attention != VARLEN_ATTENTION:
            raise ModelError(
                f"a layout with shared rows needs attention {VARLEN_ATTENTION!r}, but the model has {attention!r},"
                " which would read the rows as concatenated; load the model with the former, or create the"
                " layout without rows"
            )
        if self.rows == "padded":
            return self._padded_trunk(token_ids, layout)
        token_ids, position_ids = layout.reduce(token_ids), layout.reduce(layout.position_ids)
        if layout.ulysses is not None:
            token_ids, position_ids = layout.ulysses.split(token_ids), layout.ulysses.split(position_ids)
        output = trunk_of(self.model)(
            input_ids=token_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            attention_mask=None,
            use_cache=False,
            packed_layout=layout,
        )
        hidden: Tensor = output.last_hidden_state.squeeze(0)
        return hidden

    def _padded_trunk(self, token_ids: Tensor, layout: PackedLayout) -> Tensor:
        """Return the last hidden states [T, H] of right-padded sequences, computed as the model itself runs a batch.

        No mask hides the padding: causal trunks, including recurrent ones, do not depend on later tokens.
        """
        assert layout.ulysses is None, "ranks share the tokens of a packed row only"
        source, real = layout.padded_rows()
        arguments: dict[str, Tensor] = {}
        if self.has_sequence_rope:
            arguments["position_ids"] = layout.position_ids[source]
        output = trunk_of(self.model)(input_ids=token_ids[source], use_cache=False, **arguments)
        hidden: Tensor = output.last_hidden_state[real]
        return hidden

    def forward(
        self,
        token_ids: Tensor,
        layout: PackedLayout,
        names: Collection[str],
        temperature: float = 1.0,
        loss_mask: Tensor | None = None,
        *,
        top_k: int = 0,
        selected_ids: Tensor | None = None,
        kept_ids: Tensor | None = None,
    ) -> Outputs:
        """Return outputs by name, in float32, aligned as ``types.outputs`` states; ``hidden_states`` is [T, H].

        An empty row (T = 0) runs dummy tokens through the model and returns empty outputs that stay connected to every
        parameter's graph, so that a rank without work takes part in the collectives of sharded models. Under Ulysses
        every rank of the group gets the whole outputs; see ``UlyssesGroup.gather`` for their gradient.

        Args:
            token_ids: [T] int64, S concatenated sequences.
            layout: layout of the same S sequences; outputs are [T] even if it shares rows.
            names: outputs to compute.
            temperature: divides the logits.
            loss_mask: [T] bool; per-token outputs of other tokens are 0, and the head skips them. None selects every
                token but the first of each sequence.
            top_k: k of ``topk_ids`` and ``topk_logprobs``.
            selected_ids: [T, k] int64, the ids of ``logprobs_at``.
            kept_ids: [T, K] integers, the ids of ``truncated_logprobs``, -1 for unused entries.

        Raises:
            BackendError: the head does not provide an output, ``top_k`` exceeds the vocabulary, an id is outside it, or
                a token is not among its kept ids.
        """
        unknown = set(names) - HEAD_OUTPUTS[self.head]
        if unknown:
            raise BackendError(
                f"a model with head {self.head!r} cannot compute {', '.join(sorted(unknown))};"
                f" it provides {', '.join(sorted(HEAD_OUTPUTS[self.head]))}"
            )
        if self.head == "lm" and not {"topk_ids", "topk_logprobs", "logprobs_at"}.isdisjoint(names):
            self._check_ids(names, top_k, selected_ids, loss_mask)
        if "truncated_logprobs" in names:
            self._check_kept_ids(token_ids, kept_ids, loss_mask)
        if token_ids.shape[0]:
            return self._outputs(token_ids, layout, names, temperature, loss_mask, top_k, selected_ids, kept_ids)
        layout = PackedLayout([2], token_ids.device, layout.ulysses)
        if selected_ids is not None:
            selected_ids = selected_ids.new_zeros(2, *selected_ids.shape[1:])
        if kept_ids is not None:
            kept_ids = kept_ids.new_zeros(2, *kept_ids.shape[1:])
        outputs = self._outputs(token_ids.new_zeros(2), layout, names, temperature, None, top_k, selected_ids, kept_ids)
        return {name: tensor[:0].clone() for name, tensor in outputs.items()}

    @property
    def vocab_size(self) -> int:
        """Number of rows of the head."""
        return int(self.model.config.get_text_config().vocab_size)

    def _check_ids(
        self, names: Collection[str], top_k: int, selected_ids: Tensor | None, loss_mask: Tensor | None
    ) -> None:
        """Check ``top_k`` and ``selected_ids`` against the vocabulary, for ``forward``."""
        if not {"topk_ids", "topk_logprobs"}.isdisjoint(names) and not 1 <= top_k <= self.vocab_size:
            raise BackendError(f"k is {top_k}, but must be between 1 and the vocabulary size {self.vocab_size}")
        if "logprobs_at" in names:
            if selected_ids is None:
                raise BackendError("logprobs_at was requested without the token ids")
            ids = selected_ids if loss_mask is None else selected_ids[loss_mask]
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
                wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
                raise BackendError(
                    f"logprobs_at was requested for token {int(wrong[0])}; the vocabulary has {self.vocab_size} tokens."
                    " Token ids of a teacher with another vocabulary have another meaning"
                )

    def _check_kept_ids(self, token_ids: Tensor, kept_ids: Tensor | None, loss_mask: Tensor | None) -> None:
        """Check, for ``forward``, that every token that is scored is among the ids that it was sampled from."""
        if kept_ids is None:
            raise BackendError("truncated_logprobs was requested without the ids that the tokens were sampled from")
        wrong = ~(kept_ids == token_ids[:, None]).any(-1)
        if loss_mask is not None:
            wrong &= loss_mask
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise BackendError(
                f"truncated_logprobs was requested for token {int(token_ids[at])} (position {at} of the packed row), "
                f"which is not among the ids it was sampled from, {kept_ids[at][kept_ids[at] >= 0].tolist()[:16]}; "
                "only sampled tokens may be in the loss mask"
            )
        if kept_ids.numel() and int(kept_ids.max()) >= self.vocab_size:
            raise BackendError(
                f"truncated_logprobs was requested over token {int(kept_ids.max())}; the vocabulary has "
                f"{self.vocab_size} tokens"
            )

    def alone(self, token_ids: Tensor, last: int) -> Tensor:
        """Compute one sequence [L] by the model's own forward.

        Returns:
            [last, V] logits after the last tokens, [last] scores of a value head, or [1] of a reward head.
        """
        tokens = token_ids[None]
        if self.head == "lm" and last < len(token_ids):
            hidden: Tensor = trunk_of(self.model)(input_ids=tokens, use_cache=False).last_hidden_state
            return own_head(self.model)(hidden[0, -last:])
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[0]
        return logits[-last:] if self.head == "lm" else logits.reshape(-1)[-last:]

    def _score(self, hidden: Tensor) -> Tensor:
        """Return [N] float32 scores of hidden states [N, H], from the value or reward head."""
        score = self.model.get_submodule("score")
        values: Tensor = score(hidden).squeeze(-1).float()
        return values

    def _outputs(
        self,
        token_ids: Tensor,
        layout: PackedLayout,
        names: Collection[str],
        temperature: float,
        loss_mask: Tensor | None,
        top_k: int,
        selected_ids: Tensor | None,
        kept_ids: Tensor | None,
    ) -> Outputs:
        hidden = self._trunk(token_ids, layout)
        ulysses, num_tokens = layout.ulysses, layout.num_tokens
        outputs: Outputs = {}
        if "hidden_states" in names:
            outputs["hidden_states"] = layout.expand(hidden) if ulysses is None else ulysses.gather(hidden, num_tokens)
        if "scores" in names:
            last = layout.cu_seqlens[1:].long() - 1
            if ulysses is None:
                outputs["scores"] = self._score(hidden[layout.rows_of(last)])
            else:
                outputs["scores"] = ulysses.gather(self._score(hidden), num_tokens)[last]
        if not set(names) - {"hidden_states", "scores"}:
            return outputs
        # Shift before any split: the label of a rank's last row may be another rank's first token.
        rows, targets = prediction_rows(layout.cu_seqlens, loss_mask)
        own_rows, own_targets = layout.rows_of(rows), targets
        if ulysses is not None:
            first = ulysses.rank * hidden.shape[0]
            held = (rows >= first) & (rows < first + hidden.shape[0])
            own_rows, own_targets = rows[held] - first, targets[held]

        def aligned(values: Tensor) -> Tensor:
            """Scatter the values of this rank's rows into [T, ...]."""
            if ulysses is not None:
                part = values.new_zeros(hidden.shape[0], *values.shape[1:]).index_copy(0, own_rows, values)
                values = ulysses.gather(part, num_tokens).index_select(0, rows)
            return values.new_zeros(num_tokens, *values.shape[1:]).index_copy(0, targets, values)

        before = hidden.index_select(0, own_rows)
        if "values" in names:
            outputs["values"] = aligned(self._score(before))
            return outputs
        lm_head = own_head(self.model)
        num_rows = before.shape[0]
        chunk = self.logits_chunk_tokens or max(1, MAX_LOGITS_ELEMENTS // self.vocab_size)
        wants_top = not {"topk_ids", "topk_logprobs"}.isdisjoint(names)
        scored = token_logprobs_from_hidden(
            before,
            lm_head,
            token_ids.index_select(0, own_targets),
            temperature=temperature,
            chunk_tokens=min(chunk, max(num_rows, 1)),
            with_entropy="entropy" in names,
            recompute=num_rows > chunk,
            top_k=top_k if wants_top else 0,
            selected_ids=None if selected_ids is None else selected_ids.index_select(0, own_targets),
            kept_ids=None if kept_ids is None else kept_ids.index_select(0, own_targets),
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


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of the trunk, first to last; these are the units of sharding and recomputation.

    Raises:
        ModelError: the architecture has no list of its layers.
    """
    trunk, count = trunk_of(model), int(model.config.get_text_config().num_hidden_layers)
    layers = getattr(trunk, "layers", None)
    if isinstance(layers, nn.ModuleList):
        return list(layers)
    for module in trunk.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ModelError(f"{type(model).__name__} has no list of its {count} decoder layers, so it cannot be sharded")


def requested_outputs(model: PackedModel, batch: TrainBatch, layout: PackedLayout, request: OutputRequest) -> Outputs:
    """Return the requested outputs of a batch; passes on the request's arguments and the token data that they name.

    Raises:
        BackendError: see ``PackedModel.forward``; or the batch lacks the token data.
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

    outputs: Outputs = model(
        batch.token_ids,
        layout,
        request.names,
        request.temperature,
        batch.loss_mask,
        top_k=int(request.arguments.get("k", 0)),
        selected_ids=named("logprobs_at", "ids"),
        kept_ids=named("truncated_logprobs", "kept"),
    )
    return outputs


def packed_outputs(model: PackedModel, batch: TrainBatch, request: OutputRequest) -> Outputs:
    """Return the requested outputs of a whole batch in one forward pass, on the batch's device."""
    layout = PackedLayout(batch.lengths, batch.token_ids.device)
    return requested_outputs(model, batch, layout, request)


def packed_hidden_states(model: PreTrainedModel, batch: TrainBatch) -> Tensor:
    """Return the last hidden states of a batch, [T, H]."""
    layout = PackedLayout(batch.lengths, batch.token_ids.device)
    return PackedModel(model).hidden_states(batch.token_ids, layout)


def packed_logits(model: PreTrainedModel, batch: TrainBatch) -> Tensor:
    """Return the logits after each token, [T, V]. For inspection and small vocabularies; training never holds them
    whole.
    """
    return own_head(model)(packed_hidden_states(model, batch))
