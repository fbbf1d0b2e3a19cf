"""Assignment of requests to replicas, and their order: determined by the requests alone, never by timing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from chatlearn_core.types import GenerateRequest


@dataclass(slots=True, frozen=True, order=True)
class Work:
    """Estimated cost of a request. Compared by ``new_tokens`` first, as each sampled token costs a forward pass."""

    new_tokens: int = 0
    """Maximum number of tokens still to be sampled."""
    context_tokens: int = 0
    """Tokens to compute before the first is sampled: the prompt and resumed tokens."""

    def __add__(self, other: Work) -> Work:
        return Work(self.new_tokens + other.new_tokens, self.context_tokens + other.context_tokens)

    def __sub__(self, other: Work) -> Work:
        return Work(self.new_tokens - other.new_tokens, self.context_tokens - other.context_tokens)


def work_of(request: GenerateRequest) -> Work:
    """Upper bound of the request's work; it may end earlier."""
    done = 0 if request.resume_from is None else len(request.resume_from.token_ids)
    return Work(max(0, request.sampling.max_tokens - done), len(request.prompt_ids) + done)


def affinity_of(request: GenerateRequest) -> str:
    """A key shared by requests with the same prefix: those of a group."""
    return request.group_id or request.id


def longest_first(requests: Sequence[GenerateRequest]) -> list[int]:
    """Indices of the requests, most work first, ties in their order: a long request that starts last delays the whole
    step.
    """
    work = [work_of(request) for request in requests]
    return sorted(range(len(requests)), key=lambda i: (-work[i].new_tokens, -work[i].context_tokens, i))


@dataclass(slots=True)
class Routing:
    """Assigns groups to replicas by the open work of each replica.

    Within one wave (requests submitted together) the assignment depends on the requests and the open work, not on the
    speed of replicas.
    """

    num_replicas: int
    open_work: list[Work] = field(init=False)
    """Open work per replica."""
    _home: dict[str, int] = field(init=False, default_factory=dict)
    """Affinity -> replica that has its prefix in the KV cache."""
    _num_open: dict[str, int] = field(init=False, default_factory=dict)
    """Affinity -> number of open requests."""

    def __post_init__(self) -> None:
        self.open_work = [Work()] * self.num_replicas

    def assign(self, requests: Sequence[GenerateRequest], accepting: Collection[int] = ()) -> list[int]:
        """The replica of each request of a wave.

        Groups with a known prefix go to the replica that has it. Of the others, the one with the most work comes first
        and goes to the replica with the least open work, in a tie to the first.

        Args:
            requests: the wave.
            accepting: replicas to choose from; all if empty. A prefix on another replica is abandoned.
        """
        choice: Collection[int] = accepting or range(self.num_replicas)
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(affinity_of(request), []).append(index)
        work = {name: sum((work_of(requests[i]) for i in members), Work()) for name, members in groups.items()}
        replicas = [0] * len(requests)
        known = [name for name in groups if self._home.get(name) in choice]
        new = sorted(
            (name for name in groups if self._home.get(name) not in choice), key=work.__getitem__, reverse=True
        )
        for name in (*known, *new):
            if self._home.get(name) not in choice:
                self._home[name] = min(choice, key=lambda i: (self.open_work[i], i))
            replica = self._home[name]
            self.open_work[replica] += work[name]
            self._num_open[name] = self._num_open.get(name, 0) + len(groups[name])
            for index in groups[name]:
                replicas[index] = replica
        return replicas

    def move(self, request: GenerateRequest, source: int, target: int) -> None:
        """Move the request, and with it the later requests of its group, to another replica."""
        self.open_work[source] -= work_of(request)
        self.open_work[target] += work_of(request)
        self._home[affinity_of(request)] = target

    def done(self, request: GenerateRequest, replica: int) -> None:
        """The request is no longer open on its replica."""
        self.open_work[replica] -= work_of(request)
        self._num_open[affinity_of(request)] -= 1

    def forget(self) -> None:
        """Forget the replicas of groups without open requests: after a weight sync no replica has their prefix."""
        self._num_open = {name: count for name, count in self._num_open.items() if count}
        self._home = {name: replica for name, replica in self._home.items() if name in self._num_open}
