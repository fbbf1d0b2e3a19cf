"""Which rank of a data-parallel engine computes which request."""

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
    """Requests of one prompt go to the rank that has computed it, others to where the fewest tokens are open."""

    def __init__(self, num_ranks: int) -> None:
        """No request is open."""
        self._open_tokens = [0] * num_ranks
        """By rank: tokens of the prompts of open requests, and those that they may still sample."""
        self._prompts: dict[tuple[int, ...], _Prompt] = {}
        self._requests: dict[int, tuple[tuple[int, ...], int]] = {}
        """By key: the prompt, and the tokens that count for it."""

    @property
    def open_tokens(self) -> Sequence[int]:
        """By rank."""
        return self._open_tokens

    def spread(self, requests: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
        """By rank: its requests, in their order. They are open from now on.

        Args:
            requests: what the generator hands to the engine.
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
        """These requests are open no longer; keys that are not are ignored."""
        for key in keys:
            if key not in self._requests:
                continue
            ids, num_tokens = self._requests.pop(key)
            prompt = self._prompts[ids]
            self._open_tokens[prompt.rank] -= num_tokens
            prompt.num_open -= 1
            if not prompt.num_open:
                del self._prompts[ids]
