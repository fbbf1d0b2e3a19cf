"""Stand-ins for samples while a flow is traced: they can be passed to calls and refuse every other use."""

from __future__ import annotations

from typing import Any, NoReturn

from chatlearn_core.exceptions import FlowError
from chatlearn_core.flow.source_line import caller


class Samples:
    """Samples (or the flow's input) that do not exist yet.

    Args:
        nodes: the calls whose results these samples carry; empty for the flow's input.
        samples_of: the calls that made the samples, in order; empty for the flow's input.
    """

    __slots__ = ("nodes", "samples_of")

    def __init__(self, nodes: frozenset[int] = frozenset(), samples_of: tuple[int, ...] = ()) -> None:
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "samples_of", samples_of)

    def _refuse(self, action: str) -> NoReturn:
        raise FlowError(
            f"{caller()}: the flow {action}, but while a flow is traced there is no data yet. Decide on settings "
            "(such as self.options) instead, or move the decision into the algorithm's advantages, a reward or a "
            "function that m.apply calls"
        )

    def __bool__(self) -> bool:
        self._refuse("branches on samples (if, while, and, or, not)")

    def __len__(self) -> int:
        self._refuse("asks how many samples there are")

    def __index__(self) -> int:
        self._refuse("uses samples as a number (range, int)")

    def __float__(self) -> float:
        self._refuse("uses samples as a number (float)")

    def __iter__(self) -> Any:
        self._refuse("loops over samples")

    def __contains__(self, item: object) -> bool:
        self._refuse("looks for something in samples")

    def __getitem__(self, key: object) -> Any:
        self._refuse(f"takes element {key!r} of samples")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"reads the attribute {name!r} of samples")

    def __setattr__(self, name: str, value: object) -> None:
        self._refuse(f"sets the attribute {name!r} of samples")

    def __eq__(self, other: object) -> bool:
        self._refuse("compares samples")

    def __lt__(self, other: object) -> bool:
        self._refuse("compares samples")

    __le__ = __gt__ = __ge__ = __lt__

    def __add__(self, other: object) -> Any:
        self._refuse("calculates with samples")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __or__ = __and__ = __add__

    __hash__ = None  # type: ignore[assignment]  # symbols cannot be compared
