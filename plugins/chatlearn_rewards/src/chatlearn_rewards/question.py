"""The text of a question to a model about a sample."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chatlearn_core.types import Sample

PLACES = ("prompt", "completion", "ground_truth")
"""Words that a template may have in braces. Braces around anything but a word are text, as in formulas."""
_PLACE = re.compile(r"\{(\w+)\}")


def unknown_places(template: str) -> list[str]:
    """Return the words in braces of a template that are not in ``PLACES``."""
    return [name for name in _PLACE.findall(template) if name not in PLACES]


def fill(template: str, sample: Sample, messages: Sequence[Mapping[str, Any]]) -> str:
    """Replace the words in braces by the sample's texts; braces inside these texts stay.

    Args:
        messages: of the sample's prompt (``PromptReader``).
    """
    truth = sample.prompt.ground_truth
    values = {
        "prompt": conversation(messages),
        "completion": sample.text,
        "ground_truth": "" if truth is None else str(truth),
    }
    return _PLACE.sub(lambda place: values[place[1]], template)


def conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt as text: a single message's content, or several messages, each with its role."""
    if len(messages) == 1:
        return str(messages[0].get("content", ""))
    return "\n".join(f"{message['role']}: {message.get('content', '')}" for message in messages)
