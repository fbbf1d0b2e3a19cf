"""One model with one KV cache for all rows: computes prompts in batches, and one token of every row in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chatlearn_transformers import attention
from chatlearn_transformers.kv_cache import READ_STEP, SlotCache, round_up
from chatlearn_transformers.row_decoder import Ids, RowDecoder


class Decoder(RowDecoder):
    """Computes all rows together, each at its own position.

    A model that uses transformers' attention interface makes its own masks, including windows and chunks
    (``attention.slot_mask``); other models get a causal mask.
    """

    cache: SlotCache

    def __init__(self, model: Any, *, fused_attention: bool) -> None:
        """See ``RowDecoder``."""
        self.cache = SlotCache()
        self._index = torch.arange(0)
        super().__init__(model, attention.NAME if fused_attention else attention.EAGER_NAME)

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache memory of one token of one sequence, bytes: measured, or estimated before the first forward."""
        measured = self.cache.bytes_per_token
        return measured or _kv_bytes_per_token(self._text_config, self._head.weight.element_size())

    @torch.inference_mode()
    def prefill(self, contexts: Sequence[Ids], sources: Ids, row_start: int) -> Tensor:
        """See ``RowDecoder``. Runs one right-padded batch."""
        lengths = [len(context) for context in contexts]
        longest = max(lengths)
        padded = np.zeros((len(contexts), longest), dtype=np.int64)
        for row, context in enumerate(contexts):
            padded[row, : len(context)] = context
        device = self.device
        self.cache.reserve(row_start + len(sources), longest)
        shared = len(sources) != len(contexts) or bool((sources != np.arange(len(sources))).any())
        source_index = torch.from_numpy(sources).to(device)
        self.cache.expect_prefill(row_start, source_index if shared else None, len(sources))
        last = torch.tensor(lengths, device=device) - 1
        self._selected = (torch.arange(len(lengths), device=device), last)
        # Right padding needs no mask under causal attention: no real token attends to a later one.
        try:
            logits = self._forward(
                torch.from_numpy(padded).to(device),
                torch.arange(longest, device=device)[None],
                None if self._follows_interface else self._causal_mask(longest),
            )
        finally:
            self._selected = None
        return logits[source_index] if shared else logits

    @torch.inference_mode()
    def decode(self, token_ids: Ids, lengths: Ids) -> Tensor:
        """See ``RowDecoder``."""
        longest = int(lengths.max()) + 1
        width = round_up(longest, READ_STEP)
        self.cache.reserve(len(token_ids), width)
        device = self.device
        columns = torch.from_numpy(lengths).to(device)
        self.cache.expect_decode(columns, self._row_index(len(token_ids), device), width)
        mask = None
        if not self._follows_interface:
            mask = self._additive(torch.arange(width, device=device)[None, :] <= columns[:, None])[:, None, None]
        return self._forward(torch.from_numpy(token_ids).to(device)[:, None], columns[:, None], mask)

    def move_rows(self, sources: Ids, targets: Ids, longest: int) -> None:
        """See ``RowDecoder``."""
        device = self.device
        with torch.inference_mode():
            self.cache.move(torch.from_numpy(sources).to(device), torch.from_numpy(targets).to(device), longest)

    def _forward(self, token_ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Return logits [N, V] of the selected token of each row."""
        output = self.run(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        logits: Tensor = output.logits[:, 0]
        return logits

    def _row_index(self, num_rows: int, device: torch.device) -> Tensor:
        if self._index.shape[0] < num_rows or self._index.device != device:
            self._index = torch.arange(2 * num_rows, device=device)
        return self._index[:num_rows]

    def _causal_mask(self, length: int) -> Tensor:
        visible = torch.ones(length, length, dtype=torch.bool, device=self.device).tril_()
        return self._additive(visible)[None, None]

    def _additive(self, visible: Tensor) -> Tensor:
        """Return an additive mask in the model's dtype: 0 where visible, minus infinity elsewhere."""
        mask = torch.zeros(visible.shape, dtype=self._head.weight.dtype, device=visible.device)
        return mask.masked_fill_(~visible, -torch.inf)


def _kv_bytes_per_token(config: Any, element_size: int) -> int:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * config.num_hidden_layers * kv_heads * head_dim * element_size)
