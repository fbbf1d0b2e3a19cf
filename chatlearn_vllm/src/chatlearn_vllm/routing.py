"""Assigns requests to the ranks of a data-parallel engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Prompt:
    """A prompt with open requests."""

    rank: int
    num_open: int = 0


class Routing:
    """Send all requests of a prompt to one rank, and a new prompt to the rank with the fewest open tokens."""

    def __init__(self, num_ranks: int) -> None:
        """Start without open requests."""
        self._open_tokens = [0] * num_ranks
        """For each rank: the prompt tokens of its open requests plus the tokens they may still sample."""
        self._prompts: dict[tuple[int, ...], _Prompt] = {}
        self._requests: dict[int, tuple[tuple[int, ...], int]] = {}
        """key -> (prompt ids, number of tokens counted for the request)."""

    @property
    def open_tokens(self) -> Sequence[int]:
        """Open tokens of each rank."""
        return self._open_tokens

    def spread(self, requests: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
        """Assign requests to ranks and count them as open. Returns each rank's requests, in order.

        Args:
            requests: the generator's requests to the engine.
        """
        shares: list[list[Mapping[str, Any]]] = [[] for _ in self._open_tokens]
        for request in requests:
            ids = tuple(request["prompt_ids"])
            num_tokens = len(ids) + len(request["prior_ids"]) + request["max_tokens"]
            prompt = self._prompts.get(ids)
            if prompt is None:
                prompt = self._prompts[ids] = _Prompt(min(range(len(shares)), key=self._open_tokens.__getitem__))
            prompt.num_open += 1
            self._open_tokens[prompt.rank] += num_tokens
            self._requests[request["key"]] = ids, num_tokens
            shares[prompt.rank].append(request)
        return shares

    def ended(self, keys: Iterable[int]) -> None:
        """Remove requests from the open ones; unknown keys are ignored."""
        for key in keys:
            if key not in self._requests:
                continue
            ids, num_tokens = self._requests.pop(key)
            prompt = self._prompts[ids]
            self._open_tokens[prompt.rank] -= num_tokens
            prompt.num_open -= 1
            if not prompt.num_open:
                del self._prompts[ids]
