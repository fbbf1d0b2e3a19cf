"""One model with its KV cache: computes prompts into cache rows, and one more token of every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatlearn_transformers import attention
from chatlearn_transformers.kv_cache import READ_STEP, SlotCache, round_up

_FEW_TOKENS = 256
"""So many tokens are compared by eager attention and with all logits, more by what costs less."""

Ids = npt.NDArray[np.int64]


class Decoder:
    """Runs forwards; knows rows and lengths, nothing of requests. All methods run under ``torch.inference_mode``.

    Forwards are the model's own, so whatever it does to its logits (a scale, a cap) is done; its head sees only the
    last token of each prompt. A model whose attention follows transformers' interface makes its own masks, of windows
    and chunks too (``attention.slot_mask``); others get a causal one.
    """

    def __init__(self, model: Any, *, fused_attention: bool) -> None:
        """Change the attention of ``model``, loaded with ``eager``, to the one that generating uses."""
        self.model = model
        self.run: Callable[..., Any] = model
        """What computes a forward: the model."""
        self.cache = SlotCache()
        self._head = model.get_output_embeddings()
        self._head.register_forward_pre_hook(self._select_tokens)
        self._selected: tuple[Tensor, Tensor] | None = None
        self._index = torch.arange(0)
        self._text_config = model.config.get_text_config()
        self._slot_attention = attention.NAME if fused_attention else attention.EAGER_NAME
        self._makes_masks = self._attend_by(self._slot_attention)

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory of one token of one sequence in the cache: measured, or estimated before the first forward."""
        measured = self.cache.bytes_per_token
        return measured or _kv_bytes_per_token(self._text_config, self._head.weight.element_size())

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self._head.weight.device
        return device

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self._text_config.vocab_size)

    @torch.inference_mode()
    def own_logits(self, token_ids: Ids, first: int) -> Tensor:
        """[T - first, V] logits after tokens ``first``.. of [T], by one forward of the model alone: no cache, its own
        attention, no mask of ours, and its head over all tokens where they are few.
        """
        few = len(token_ids) <= _FEW_TOKENS
        positions = torch.arange(first, len(token_ids), device=self.device)
        if self._makes_masks:
            # Eager attention is what a model means, but holds all scores of a layer at once.
            capped = getattr(self._text_config, "attn_logit_softcapping", None) is not None
            self._attend_by("sdpa" if self.model._supports_sdpa and not (few or capped) else "eager")
        self._selected = None if few else (torch.zeros_like(positions), positions)
        try:
            output = self.run(input_ids=torch.from_numpy(token_ids).to(self.device)[None], use_cache=False)
        finally:
            self._selected = None
            if self._makes_masks:
                self._attend_by(self._slot_attention)
        logits: Tensor = output.logits
        return logits[0, first:] if few else logits[:, 0]

    @torch.inference_mode()
    def prefill(self, contexts: Sequence[Ids], sources: Ids, row_start: int) -> Tensor:
        """Compute whole contexts into fresh cache rows.

        Args:
            contexts: U token sequences, computed as one right-padded batch.
            sources: [R] which context each of the rows ``row_start + i`` takes.
            row_start: first row; rows before it stay.

        Returns:
            [R, V] logits after the last token of each row.
        """
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
        # Right padding needs no mask of its own under causal attention: no real token looks at a later one.
        try:
            logits = self._forward(
                torch.from_numpy(padded).to(device),
                torch.arange(longest, device=device)[None],
                None if self._makes_masks else self._causal_mask(longest),
            )
        finally:
            self._selected = None
        return logits[source_index] if shared else logits

    @torch.inference_mode()
    def decode(self, token_ids: Ids, lengths: Ids) -> Tensor:
        """Compute one token of each of the first N rows.

        Args:
            token_ids: [N] the token that follows what a row holds.
            lengths: [N] tokens each row holds; the new one takes this position.

        Returns:
            [N, V] logits after that token.
        """
        longest = int(lengths.max()) + 1
        width = round_up(longest, READ_STEP)
        self.cache.reserve(len(token_ids), width)
        device = self.device
        columns = torch.from_numpy(lengths).to(device)
        self.cache.expect_decode(columns, self._row_index(len(token_ids), device), width)
        mask = None
        if not self._makes_masks:
            mask = self._additive(torch.arange(width, device=device)[None, :] <= columns[:, None])[:, None, None]
        return self._forward(torch.from_numpy(token_ids).to(device)[:, None], columns[:, None], mask)

    def move_rows(self, sources: Ids, targets: Ids, longest: int) -> None:
        """Copy cache rows ``sources`` over ``targets``; no row holds more than ``longest`` tokens."""
        device = self.device
        with torch.inference_mode():
            self.cache.move(torch.from_numpy(sources).to(device), torch.from_numpy(targets).to(device), longest)

    def _forward(self, token_ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """[N, V] logits of the tokens that the head sees, one a row."""
        output = self.run(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        logits: Tensor = output.logits[:, 0]
        return logits

    def _select_tokens(self, head: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the head: keep the hidden states [N, 1, H] of the selected (rows, columns) only."""
        if self._selected is None:
            return None
        hidden, *others = inputs
        return (hidden[self._selected][:, None], *others)

    def _attend_by(self, implementation: str) -> bool:
        """Switch the model's attention; whether it can be."""
        self.model.set_attn_implementation(implementation)
        return bool(self._text_config._attn_implementation == implementation)

    def _row_index(self, num_rows: int, device: torch.device) -> Tensor:
        if self._index.shape[0] < num_rows or self._index.device != device:
            self._index = torch.arange(2 * num_rows, device=device)
        return self._index[:num_rows]

    def _causal_mask(self, length: int) -> Tensor:
        visible = torch.ones(length, length, dtype=torch.bool, device=self.device).tril_()
        return self._additive(visible)[None, None]

    def _additive(self, visible: Tensor) -> Tensor:
        """0 where visible, minus infinity elsewhere, in the model's type (eager attention adds its mask)."""
        mask = torch.zeros(visible.shape, dtype=self._head.weight.dtype, device=visible.device)
        return mask.masked_fill_(~visible, -torch.inf)


def _kv_bytes_per_token(config: Any, element_size: int) -> int:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * config.num_hidden_layers * kv_heads * head_dim * element_size)
