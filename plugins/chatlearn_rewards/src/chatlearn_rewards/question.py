"""The text of the question that a model is asked about a sample."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chatlearn_core.types import Sample

PLACES = ("prompt", "completion", "ground_truth")
"""What a template may name in braces. Braces around anything that is no word are text, such as in formulas."""
_PLACE = re.compile(r"\{(\w+)\}")


def unknown_places(template: str) -> list[str]:
    """Words in braces that a template may not have."""
    return [name for name in _PLACE.findall(template) if name not in PLACES]


def fill(template: str, sample: Sample) -> str:
    """The template with what it names of the sample; what is filled in is not looked at again."""
    truth = sample.prompt.ground_truth
    values = {
        "prompt": conversation(sample),
        "completion": sample.text,
        "ground_truth": "" if truth is None else str(truth),
    }
    return _PLACE.sub(lambda place: values[place[1]], template)


def conversation(sample: Sample) -> str:
    """The prompt as text: of a single message its content, of several each with its role."""
    messages = sample.prompt.messages
    if not messages:
        return sample.prompt.text
    if len(messages) == 1:
        return str(messages[0].get("content", ""))
    return "\n".join(f"{message['role']}: {message.get('content', '')}" for message in messages)
