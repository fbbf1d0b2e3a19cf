"""A generator that expands media in its prompts and reports data of every token, including prompt tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols.generator import OnTokens
from chatlearn_core.types import Completion, GenerateRequest, Media, TokenIds
from chatlearn_testing.fakes.generator import FakeGenerator

PLACEHOLDER = 26
"""Token ``z``, the placeholder of one medium in a prompt."""
ROUTES = "routed_experts"
"""Name of the token data."""
NUM_LAYERS, NUM_CHOICES, NUM_EXPERTS = 3, 2, 11


class MediaGenerator(FakeGenerator):
    """Replaces every placeholder in a prompt by one token for each byte of its medium, and reports the experts of each
    token of prompt and completion, which depend only on the token and its position.
    """

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """See the protocol. A prompt that holds the tokens of its media, such as that of a further turn, is left alone.

        Raises:
            BackendError: the prompt has another number of placeholders than media.
        """
        prompt_ids = request.prompt_ids
        if (prior := request.resume_from) is not None:
            if prior.prompt_ids is None or ROUTES not in prior.token_data or ROUTES not in prior.prompt_token_data:
                raise BackendError(f"{self.name}: request {request.id!r} resumes a completion without its token data")
            prompt_ids = prior.prompt_ids
        elif not _is_expanded(prompt_ids, request.media):
            prompt_ids = expanded(prompt_ids, request.media, f"{self.name}: request {request.id!r}")
        made = await super().generate(replace(request, prompt_ids=prompt_ids), on_tokens)
        routes = routed_experts(np.concatenate([prompt_ids, made.token_ids]))
        if prior is not None and not np.array_equal(routes[: len(prompt_ids)], prior.prompt_token_data[ROUTES]):
            raise BackendError(
                f"{self.name}: request {request.id!r} resumes with other experts of its prompt's tokens than this"
                " generator computes"
            )
        return replace(
            made,
            prompt_ids=prompt_ids,
            prompt_token_data={ROUTES: routes[: len(prompt_ids)]},
            token_data={ROUTES: routes[len(prompt_ids) :]},
        )


def expanded(prompt_ids: TokenIds, media: tuple[Media, ...], where: str) -> TokenIds:
    """Return the prompt [P'] with every placeholder replaced by the tokens of its medium.

    Raises:
        BackendError: there are not as many media as placeholders.
    """
    places = np.flatnonzero(prompt_ids == PLACEHOLDER)
    if len(places) != len(media):
        raise BackendError(f"{where} has {len(places)} placeholders (token {PLACEHOLDER}) and {len(media)} media")
    parts: list[TokenIds] = []
    at = 0
    for place, medium in zip(places, media, strict=True):
        parts += [prompt_ids[at:place], media_tokens(medium)]
        at = int(place) + 1
    return np.concatenate([*parts, prompt_ids[at:]])


def media_tokens(medium: Media) -> TokenIds:
    """Return one token per byte, [N], none of which is a placeholder or the end of the sequence."""
    tokens: TokenIds = 1 + np.frombuffer(medium.content, np.uint8).astype(np.int64) % (PLACEHOLDER - 1)
    return tokens


def routed_experts(token_ids: TokenIds) -> npt.NDArray[np.int16]:
    """Return the experts of each token of a whole sequence, [T, layers, choices]."""
    positions = np.arange(len(token_ids))[:, None, None]
    layers, choices = np.arange(NUM_LAYERS)[None, :, None], np.arange(NUM_CHOICES)[None, None, :]
    routes: npt.NDArray[np.int64] = (token_ids[:, None, None] * 7 + positions * 3 + layers * 5 + choices) % NUM_EXPERTS
    return routes.astype(np.int16)


def _is_expanded(prompt_ids: TokenIds, media: tuple[Media, ...]) -> bool:
    """Whether the tokens of all media are in the prompt, in their order."""
    text, at = prompt_ids.tobytes(), 0
    for medium in media:
        found = text.find(media_tokens(medium).tobytes(), at)
        if found < 0:
            return False
        at = found + 1
    return True
