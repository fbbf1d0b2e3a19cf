"""The scheduler's interface to a model: computes prompts into rows, and one more token of every row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids = npt.NDArray[np.int64]

_FULL_CHECK_TOKENS = 256
"""Up to this number of tokens, compare with eager attention and all logits; above it, use cheaper ways."""


class RowCache(Protocol):
    """The content of a decoder's rows."""

    @property
    def num_bytes(self) -> int:
        """Allocated memory in bytes."""

    def reserve(self, num_rows: int, num_columns: int, most_columns: int = 0) -> None:
        """Make room for ``num_rows`` sequences of ``num_columns`` tokens, keeping the content; the longest may have
        ``most_columns`` in the end.
        """

    def clear(self) -> None:
        """Free the memory and remove all sequences."""


class RowDecoder(ABC):
    """Runs forwards; knows rows and lengths, but no requests. All methods run under ``torch.inference_mode``.

    Forwards are the model's own, so they include any scale or cap of the logits; the head sees only the last token of
    each prompt.
    """

    cache: RowCache

    def __init__(self, model: Any, implementation: str) -> None:
        """Switch ``model``, loaded with ``eager`` attention, to ``implementation``, if it supports that."""
        self.model = model
        self.run: Callable[..., Any] = model
        """Function that computes a forward; by default the model."""
        self._text_config = model.config.get_text_config()
        self._head = model.get_output_embeddings()
        self._hook = self._head.register_forward_pre_hook(self._select_tokens)
        self._selected: tuple[Tensor, Tensor] | None = None
        self._implementation = implementation
        self._follows_interface = self._attend_by(implementation)

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Cache memory of one token of one sequence, bytes."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        device: torch.device = self._head.weight.device
        return device

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self._text_config.vocab_size)

    @abstractmethod
    def prefill(self, contexts: Sequence[Ids], sources: Ids, row_start: int) -> Tensor:
        """Compute token sequences into rows from ``row_start`` on.

        Args:
            contexts: U token sequences.
            sources: [R] index of the context for each row ``row_start + i``.
            row_start: first row; earlier rows are unchanged.

        Returns:
            [R, V] logits after the last token of each row.
        """

    @abstractmethod
    def decode(self, token_ids: Ids, lengths: Ids) -> Tensor:
        """Compute one token of each of the first N rows.

        Args:
            token_ids: [N] next token of each row.
            lengths: [N] number of tokens in each row, which is the position of the new token.

        Returns:
            [N, V] logits after that token.
        """

    @abstractmethod
    def move_rows(self, sources: Ids, targets: Ids, longest: int) -> None:
        """Move the content of rows ``sources`` to rows ``targets``; no row has more than ``longest`` tokens."""

    @torch.inference_mode()
    def own_logits(self, token_ids: Ids, first: int) -> Tensor:
        """Return logits [T - first, V] after tokens ``first``.. of [T], by one forward of the model alone.

        It uses no cache, the model's own attention and masks, and for few tokens the head over all of them.
        """
        few = len(token_ids) <= _FULL_CHECK_TOKENS
        positions = torch.arange(first, len(token_ids), device=self.device)
        if self._follows_interface:
            # Eager attention defines the model, but holds all scores of a layer at once.
            self._attend_by("eager" if few else self._cheap_attention())
        self._selected = None if few else (torch.zeros_like(positions), positions)
        try:
            output = self.run(input_ids=torch.from_numpy(token_ids).to(self.device)[None], use_cache=False)
        finally:
            self._selected = None
            if self._follows_interface:
                self._attend_by(self._implementation)
        logits: Tensor = output.logits
        return logits[0, first:] if few else logits[:, 0]

    def release(self) -> None:
        """Restore the model as it was loaded."""
        self.cache.clear()
        self._hook.remove()
        if self._follows_interface:
            self._attend_by("eager")

    def _cheap_attention(self) -> str:
        """Return ``sdpa`` if it computes the same; it ignores a soft cap of the scores."""
        capped = getattr(self._text_config, "attn_logit_softcapping", None) is not None
        return "sdpa" if self.model._supports_sdpa and not capped else "eager"

    def _select_tokens(self, head: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep only the hidden states [N, 1, H] of the selected (rows, columns); runs before the head."""
        if self._selected is None:
            return None
        hidden, *others = inputs
        return (hidden[self._selected][:, None], *others)

    def _attend_by(self, implementation: str) -> bool:
        """Switch the model's attention. Returns whether the model supports it."""
        self.model.set_attn_implementation(implementation)
        return bool(self._text_config._attn_implementation == implementation)
