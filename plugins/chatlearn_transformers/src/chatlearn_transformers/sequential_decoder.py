"""Decodes one sequence at a time, each with the model's own cache, for models that cannot share a cache.

Recurrent, convolutional and linear attention keep states that no mask can separate; ALiBi and windows in buffers count
cache columns. Each row is a separate continuation by the model itself.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from chatlearn_transformers.row_decoder import Ids, RowDecoder

_CACHES = ("past_key_values", "cache_params", "state")
"""Names under which models return and accept their cache."""


class OwnCaches:
    """A separate cache of the model for every row."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[str, Any]] = {}
        """Row -> (name of the cache argument, cache)."""

    @property
    def num_bytes(self) -> int:
        """Allocated memory in bytes; shared tensors count once."""
        found = {id(tensor): tensor for cache in self.rows.values() for tensor in _tensors(cache, set())}
        return sum(tensor.numel() * tensor.element_size() for tensor in found.values())

    def reserve(self, num_rows: int, num_columns: int, most_columns: int = 0) -> None:
        """Do nothing: these caches grow by themselves."""

    def clear(self) -> None:
        """Remove all sequences."""
        self.rows.clear()


class SequentialDecoder(RowDecoder):
    """Computes every row in a separate forward. Slower than ``Decoder``, about by the number of rows."""

    cache: OwnCaches

    def __init__(self, model: Any, *, fused_attention: bool) -> None:
        """See ``RowDecoder``."""
        self.cache = OwnCaches()
        self._text_config = model.config.get_text_config()
        self.model = model
        super().__init__(model, self._cheap_attention() if fused_attention else "eager")
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._bytes_per_token = 1

    @property
    def kv_bytes_per_token(self) -> int:
        """Largest observed cache size per token, including states of fixed size."""
        return self._bytes_per_token

    @torch.inference_mode()
    def prefill(self, contexts: Sequence[Ids], sources: Ids, row_start: int) -> Tensor:
        """See ``RowDecoder``."""
        logits: list[Tensor] = []
        caches: list[tuple[str, Any]] = []
        for context in contexts:
            self._selected = (torch.zeros(1, dtype=torch.int64), torch.tensor([len(context) - 1]))
            try:
                output = self.run(input_ids=torch.from_numpy(context).to(self.device)[None], use_cache=True)
            finally:
                self._selected = None
            logits.append(output.logits[:, 0])
            caches.append(_cache_of(output))
            size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(caches[-1], set()))
            self._bytes_per_token = max(self._bytes_per_token, -(-size // len(context)))
        taken: set[int] = set()
        for offset, source in enumerate(sources.tolist()):
            cache = caches[source]
            self.cache.rows[row_start + offset] = copy.deepcopy(cache) if source in taken else cache
            taken.add(source)
        return torch.cat(logits)[torch.from_numpy(sources).to(self.device)]

    @torch.inference_mode()
    def decode(self, token_ids: Ids, lengths: Ids) -> Tensor:
        """See ``RowDecoder``."""
        logits: list[Tensor] = []
        rows = self.cache.rows
        for row, (token_id, length) in enumerate(zip(token_ids.tolist(), lengths.tolist(), strict=True)):
            arguments: dict[str, Any] = {rows[row][0]: rows[row][1]}
            if self._takes_positions:
                arguments["position_ids"] = torch.tensor([[length]], device=self.device)
            output = self.run(input_ids=torch.tensor([[token_id]], device=self.device), use_cache=True, **arguments)
            logits.append(output.logits[:, -1])
            rows[row] = _cache_of(output)
        return torch.cat(logits)

    def move_rows(self, sources: Ids, targets: Ids, longest: int) -> None:
        """See ``RowDecoder``."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.cache.rows[target] = self.cache.rows.pop(source)


def _cache_of(output: Any) -> tuple[str, Any]:
    """Return the cache in a model's output, with its name.

    Raises:
        NotImplementedError: there is none.
    """
    for name in _CACHES:
        cache = getattr(output, name, None)
        if cache is not None:
            return name, cache
    raise NotImplementedError(f"{type(output).__name__} has no cache ({', '.join(_CACHES)})")


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield every tensor inside a cache, its layers and their containers."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif type(value).__module__.startswith("transformers") and hasattr(value, "__dict__"):
        parts = list(vars(value).values())
    for part in parts:
        yield from _tensors(part, seen)
