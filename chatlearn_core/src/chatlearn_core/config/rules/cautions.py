"""Settings that are allowed and hardly meant: a run says so and goes on."""

from __future__ import annotations

from collections.abc import Iterator

from chatlearn_core.config.problems import KeyPath, Problem
from chatlearn_core.config.rules.checked import Checked, Rule


def options_are_meant(checked: Checked) -> Iterator[Problem]:
    """What the options of a plugin say about themselves.

    An options model with an attribute ``warnings`` holds (option, sentence) pairs; an option in a nested model is
    written with dots.
    """
    for key, choice in checked.choices.selected.items():
        section: KeyPath = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        if "warnings" in type(choice.options).model_fields:
            continue  # an option of that name
        for option, sentence in getattr(choice.options, "warnings", ()):
            value = choice.options
            for name in option.split("."):
                value = getattr(value, name)
            yield Problem((*section, "options", *option.split(".")), sentence, value)


CAUTION_RULES: tuple[Rule, ...] = (options_are_meant,)
