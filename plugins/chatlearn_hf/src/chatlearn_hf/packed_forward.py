"""Runs packed sequences through a transformers model and computes the outputs that losses and flows request."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from chatlearn_core.exceptions import ModelError
from chatlearn_core.protocols import Head
from chatlearn_core.types import OutputRequest, Outputs, TrainBatch
from chatlearn_hf.own_head import own_head, trunk_of
from chatlearn_hf.sequence_rope import give_each_sequence_its_rope
from chatlearn_hf.token_outputs import RequestedLogprobs, TokenOutputs
from chatlearn_hf.varlen_attention import VARLEN_ATTENTION, PackedLayout
from chatlearn_losses import TokenLogprobs, default_chunk_tokens, token_logprobs_from_hidden

Rows = Literal["packed", "padded"]
"""How sequences pass through the trunk: concatenated in one row, or each in its own right-padded row."""


class PackedModel(nn.Module):
    """A transformers model with a head whose forward pass takes packed tokens and returns aligned outputs.

    A trainer wraps this unit (FSDP, compile): trunk, head and token outputs run inside one ``forward``. Checkpoint
    names are those of ``self.model``.

    Args:
        model: from ``load_model``; its attention must be ``chatlearn_varlen``, ``sdpa``, ``eager`` or a flash
            attention of transformers.
        head: the model's head.
        logits_chunk_tokens: number of tokens whose logits are held at once; None: ``default_chunk_tokens``. Logits that
            fit into one chunk are kept for the backward pass; otherwise they are recomputed there.

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

        Where ranks share the row (``layout.sharing``), every rank passes the whole row and gets the states of its part.
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
        if layout.sharing is not None:
            token_ids, position_ids = layout.sharing.split(token_ids), layout.sharing.split(position_ids)
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
        assert layout.sharing is None, "ranks share the tokens of a packed row only"
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
        parameter's graph, so that a rank without work takes part in the collectives of sharded models. Every
        rank that shares a row gets the whole outputs; see ``TokenGroup.gather`` for their gradient.

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
        call = TokenOutputs(names, temperature, loss_mask, top_k, selected_ids, kept_ids)
        call.check(self.head, token_ids, self.vocab_size)
        if not token_ids.shape[0]:
            layout = PackedLayout([2], token_ids.device, layout.sharing)
            outputs = call.of_two_tokens().of(
                self._trunk(token_ids.new_zeros(2), layout), token_ids.new_zeros(2), layout, self._score, self._logprobs
            )
            return {name: tensor[:0].clone() for name, tensor in outputs.items()}
        return call.of(self._trunk(token_ids, layout), token_ids, layout, self._score, self._logprobs)

    @property
    def vocab_size(self) -> int:
        """Number of rows of the head."""
        return int(self.model.config.get_text_config().vocab_size)

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
        score = self.model.get_submodule("score")
        values: Tensor = score(hidden).squeeze(-1).float()
        return values

    def _logprobs(self, rows: Tensor, labels: Tensor, requested: RequestedLogprobs) -> TokenLogprobs:
        num_rows = rows.shape[0]
        chunk = self.logits_chunk_tokens or default_chunk_tokens(self.vocab_size, rows.device)
        return token_logprobs_from_hidden(
            rows,
            own_head(self.model),
            labels,
            temperature=requested.temperature,
            chunk_tokens=min(chunk, max(num_rows, 1)),
            with_entropy=requested.with_entropy,
            recompute=num_rows > chunk,
            top_k=requested.top_k,
            selected_ids=requested.selected_ids,
            kept_ids=requested.kept_ids,
        )


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
    call = TokenOutputs.requested(request, batch)
    outputs: Outputs = model(
        batch.token_ids,
        layout,
        call.names,
        call.temperature,
        call.loss_mask,
        top_k=call.top_k,
        selected_ids=call.selected_ids,
        kept_ids=call.kept_ids,
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
