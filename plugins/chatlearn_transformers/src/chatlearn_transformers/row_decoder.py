"""What the scheduler asks of a model: prompts into rows, and one more token of every row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids = npt.NDArray[np.int64]

_FEW_TOKENS = 256
"""So many tokens are compared by eager attention and with all logits, more by what costs less."""


class RowCache(Protocol):
    """What a decoder keeps of the sequences in its rows."""

    @property
    def num_bytes(self) -> int:
        """Memory allocated."""

    def reserve(self, num_rows: int, num_columns: int) -> None:
        """Make room for ``num_rows`` sequences of ``num_columns`` tokens; what is there stays."""

    def clear(self) -> None:
        """Release the memory and forget every sequence."""


class RowDecoder(ABC):
    """Runs forwards; knows rows and lengths, nothing of requests. All methods run under ``torch.inference_mode``.

    Forwards are the model's own, so whatever it does to its logits (a scale, a cap) is done; its head sees only the
    last token of each prompt.
    """

    cache: RowCache

    def __init__(self, model: Any, implementation: str) -> None:
        """Let ``model``, loaded with ``eager`` attention, attend by ``implementation``, if it can be told to."""
        self.model = model
        self.run: Callable[..., Any] = model
        """What computes a forward: the model."""
        self._text_config = model.config.get_text_config()
        self._head = model.get_output_embeddings()
        self._hook = self._head.register_forward_pre_hook(self._select_tokens)
        self._selected: tuple[Tensor, Tensor] | None = None
        self._implementation = implementation
        self._follows_interface = self._attend_by(implementation)

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Memory of one token of one sequence in the cache."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
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
            sources: [R] which context each of the rows ``row_start + i`` takes.
            row_start: first row; rows before it stay.

        Returns:
            [R, V] logits after the last token of each row.
        """

    @abstractmethod
    def decode(self, token_ids: Ids, lengths: Ids) -> Tensor:
        """Compute one token of each of the first N rows.

        Args:
            token_ids: [N] the token that follows what a row holds.
            lengths: [N] tokens each row holds; the new one takes this position.

        Returns:
            [N, V] logits after that token.
        """

    @abstractmethod
    def move_rows(self, sources: Ids, targets: Ids, longest: int) -> None:
        """Put what rows ``sources`` hold into rows ``targets``; no row holds more than ``longest`` tokens."""

    @torch.inference_mode()
    def own_logits(self, token_ids: Ids, first: int) -> Tensor:
        """[T - first, V] logits after tokens ``first``.. of [T], by one forward of the model alone: no cache, its own
        attention, no mask of ours, and its head over all tokens where they are few.
        """
        few = len(token_ids) <= _FEW_TOKENS
        positions = torch.arange(first, len(token_ids), device=self.device)
        if self._follows_interface:
            # Eager attention is what a model means, but holds all scores of a layer at once.
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
        """Leave the model as it was loaded."""
        self.cache.clear()
        self._hook.remove()
        if self._follows_interface:
            self._attend_by("eager")

    def _cheap_attention(self) -> str:
        """``sdpa`` where that computes the same: it drops a cap of the scores."""
        capped = getattr(self._text_config, "attn_logit_softcapping", None) is not None
        return "sdpa" if self.model._supports_sdpa and not capped else "eager"

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
