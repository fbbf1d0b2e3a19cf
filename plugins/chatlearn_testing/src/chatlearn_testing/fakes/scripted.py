"""A policy that says prepared texts, for tests of environments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chatlearn_core.protocols import OnTokens
from chatlearn_core.types import Completion, GenerateRequest, VersionSpan


@dataclass
class Scripted:
    """Answers the requests of a ``RolloutContext`` with prepared texts, in order, and keeps the requests.

    A text ends with the end-of-turn token, or with a token of ``ends`` that it has last, unless the request's
    ``max_tokens`` cuts it. ``split`` encodes it character
    by character, as a policy may sample it and no tokenizer would encode it. A text may be given in parts, each of
    which is encoded by itself; this is how a policy writes special tokens within a turn.
    """

    tokenizer: Any
    texts: list[str | tuple[str, ...]] = field(default_factory=list)
    asked: list[GenerateRequest] = field(default_factory=list)
    split: bool = True
    ends: tuple[str, ...] = ()
    delay_s: float = 0.0
    fails: Exception | None = None
    pace: Callable[[int], Awaitable[None]] | None = None
    """Awaited before each token with its position, and with their number before the completion; tokens are then told as
    they are sampled. None: they are not told."""

    async def __call__(self, handle: str, request: GenerateRequest, on_tokens: OnTokens | None = None, /) -> Completion:
        """Return the next text as a completion."""
        self.asked.append(request)
        await asyncio.sleep(self.delay_s)
        if self.fails is not None:
            raise self.fails
        text = self.texts.pop(0)
        parts = list(text) if self.split or isinstance(text, tuple) else [text]
        ids = [i for part in parts for i in self.tokenizer.encode(part, add_special_tokens=False)]
        if not ids or ids[-1] not in self.tokenizer.convert_tokens_to_ids(list(self.ends)):
            ids.append(self.tokenizer.eos_token_id)
        cut = ids[: request.sampling.max_tokens]
        if self.pace is not None:
            for position, token in enumerate(cut):
                await self.pace(position)
                if on_tokens is not None:
                    on_tokens(position, [token])
            await self.pace(len(cut))
        return Completion(
            request_id=request.id,
            token_ids=np.array(cut, np.int64),
            logprobs=(-0.5 - np.arange(len(cut)) / 64).astype(np.float32),
            basis=request.sampling.basis,
            finish_reason="stop" if len(cut) == len(ids) else "length",
            sampling=request.sampling,
            version_spans=(VersionSpan(0, len(cut), len(self.asked)),),
            text="".join(text),
        )
