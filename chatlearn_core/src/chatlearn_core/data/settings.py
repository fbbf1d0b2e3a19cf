"""The settings that the data pipeline reads from a run's configuration; ``config.models`` implements them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from chatlearn_core.protocols.prompt_renderer import ControlTokenPolicy

Split = Literal["train", "eval"]
OnBadRow = Literal["error", "skip"]


class DatasetSettings(Protocol):
    """One dataset; ``config.models.DatasetConfig`` describes each setting."""

    @property
    def path(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def split(self) -> str | None: ...
    @property
    def weight(self) -> float: ...
    @property
    def name(self) -> str | None: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


class DataSettings(Protocol):
    """All datasets of a run; see ``config.models.DataConfig``."""

    @property
    def train(self) -> Sequence[DatasetSettings]: ...
    @property
    def eval(self) -> Sequence[DatasetSettings]: ...
    @property
    def apply_chat_template(self) -> bool: ...
    @property
    def system_prompt(self) -> str | None: ...
    @property
    def on_bad_row(self) -> OnBadRow: ...
    @property
    def control_tokens(self) -> ControlTokenPolicy: ...
