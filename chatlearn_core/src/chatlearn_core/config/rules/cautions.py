"""Settings that are allowed and hardly meant: a run says so and goes on."""

from __future__ import annotations

from collections.abc import Iterator

from chatlearn_core.config.problems import KeyPath, Problem
from chatlearn_core.config.rules.checked import Checked, Related, Rule
from chatlearn_core.plugins.compatibility import bases_of
from chatlearn_core.plugins.records import GeneratorSpec


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


def logprobs_compare(checked: Checked) -> Iterator[Problem]:
    """Raw logprobs cannot be compared with a trainer's at another temperature."""
    sampling = checked.config.sampling
    if sampling.temperature in (0.0, 1.0):
        return
    for name, _ in checked.roles("generator"):
        choice = checked.choices.selected.get(f"roles.{name}")
        if choice is None or not isinstance(choice.record, GeneratorSpec):
            continue
        if "processed" not in bases_of(choice.record, choice.options):
            rule = (
                f"{choice.record.name} returns logprobs of the raw distribution, the trainer those at the sampling "
                "temperature: they cannot be compared, and mismatch/* is not measured"
            )
            remedy = "set the generator's option for processed logprobs, if it has one, or sample at temperature 1"
            related: Related = ((("sampling", "temperature"), sampling.temperature),)
            yield Problem(("roles", name), rule, remedy=remedy, related=related)


CAUTION_RULES: tuple[Rule, ...] = (options_are_meant, logprobs_compare)
