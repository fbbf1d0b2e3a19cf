"""One model with its KV cache: computes prompts into cache rows, and one more token of every row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatlearn_transformers import attention
from chatlearn_transformers.architecture import check_probe, probe_token_ids
from chatlearn_transformers.kv_cache import READ_STEP, SlotCache, round_up

Ids = npt.NDArray[np.int64]


class Decoder:
    """Runs forwards; knows rows and lengths, nothing of requests. All methods run under ``torch.inference_mode``.

    The model's body gives hidden states, and its head is applied to the last token of each sequence only.
    """

    def __init__(self, model: Any, *, fused_attention: bool) -> None:
        self.model = model
        self.cache = SlotCache()
        self._body = model.base_model
        self._head = model.get_output_embeddings()
        self._fused = fused_attention
        self._index = torch.arange(0)
        self.kv_bytes_per_token = _kv_bytes_per_token(model.config.get_text_config(), self._head.weight.element_size())
        """Memory of one token of one sequence in the cache."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self._head.weight.device
        return device

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.model.config.get_text_config().vocab_size)

    @torch.inference_mode()
    def probe(self, path: str) -> None:
        """Compute a few tokens as the model does by itself and through the cache, and compare.

        Leaves the model with the attention that generating uses.

        Raises:
            ModelError: the results differ; see ``check_probe``.
        """
        tokens = probe_token_ids(self.vocab_size, self.device)
        expected = self.model(input_ids=tokens, use_cache=False).logits[0]
        if self._fused:
            self.model.set_attn_implementation(attention.NAME)
        ids = tokens[0].cpu().numpy()
        split = len(ids) - 2
        found = [self.prefill([ids[:split]], np.zeros(2, np.int64), 0)[0]]
        for position in range(split, len(ids)):
            # A second row, one token behind, so that rows of unequal length are compared too.
            step = self.decode(ids[[position, split]], np.array([position, split]))
            found.append(step[0])
        self.cache.clear()
        check_probe(expected[split - 1 :], torch.stack(found), path, self.model.config.model_type)

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
        # Right padding needs no mask under causal attention: no real token looks at a later one.
        hidden = self._forward(
            torch.from_numpy(padded).to(device), torch.arange(longest, device=device)[None], self._causal_mask(longest)
        )
        last = torch.tensor(lengths, device=device) - 1
        logits: Tensor = self._head(hidden[torch.arange(len(lengths), device=device), last])
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
        visible = torch.arange(width, device=device)[None, :] <= columns[:, None]
        hidden = self._forward(
            torch.from_numpy(token_ids).to(device)[:, None], columns[:, None], self._additive(visible)[:, None, None]
        )
        logits: Tensor = self._head(hidden[:, 0])
        return logits

    def move_rows(self, sources: Ids, targets: Ids, longest: int) -> None:
        """Copy cache rows ``sources`` over ``targets``; no row holds more than ``longest`` tokens."""
        device = self.device
        with torch.inference_mode():
            self.cache.move(torch.from_numpy(sources).to(device), torch.from_numpy(targets).to(device), longest)

    def _forward(self, token_ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        output = self._body(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _row_index(self, num_rows: int, device: torch.device) -> Tensor:
        if self._index.shape[0] < num_rows or self._index.device != device:
            self._index = torch.arange(2 * num_rows, device=device)
        return self._index[:num_rows]

    def _causal_mask(self, length: int) -> Tensor | None:
        """None where the attention is causal by itself."""
        if self._fused:
            return None
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
