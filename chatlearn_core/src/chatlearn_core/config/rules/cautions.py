"""Warnings about settings that are allowed but probably unintended; the run continues."""

from __future__ import annotations

from collections.abc import Iterator

from chatlearn_config.problems import KeyPath, Problem
from chatlearn_core.config.models import SamplingConfig
from chatlearn_core.config.rules.checked import Checked, Related, Rule
from chatlearn_core.config.rules.evaluation import sections
from chatlearn_core.plugins.compatibility import bases_of
from chatlearn_core.plugins.records import GeneratorSpec


def options_are_meant(checked: Checked) -> Iterator[Problem]:
    """Report the warnings that plugins give about their own options.

    An options model may have an attribute ``warnings`` that holds (option, sentence) pairs; options of a nested model
    have dotted names.
    """
    for key, choice in checked.choices.selected.items():
        section: KeyPath = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        if "warnings" in type(choice.options).model_fields:
            continue  # it is an option named warnings
        for option, sentence in getattr(choice.options, "warnings", ()):
            value = choice.options
            for name in option.split("."):
                value = getattr(value, name)
            yield Problem((*section, "options", *option.split(".")), sentence, value)


def logprobs_compare(checked: Checked) -> Iterator[Problem]:
    """Warn if raw logprobs would be compared with a trainer's at another temperature."""
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


def sampling_repeats(checked: Checked) -> Iterator[Problem]:
    """Warn if a generator does not sample by the request's seed: a resumed run then samples different tokens."""
    for name, role in checked.roles("generator"):
        record = checked.record(f"roles.{name}", GeneratorSpec)
        if record is not None and not record.seeded:
            rule = (
                f"{record.name} does not sample by the seed of a request (seeded in its plugin record): two runs with "
                "the same seed differ, and so do a resumed run and an uninterrupted one"
            )
            yield Problem(("roles", name, "backend"), rule, role.backend)


def judges_hold_still(checked: Checked) -> Iterator[Problem]:
    """Warn if a judge without its own model takes the weights of the policy that it judges."""
    for name, role in checked.roles("reward"):
        for used in sorted(role.used_roles):
            found = checked.config.roles.get(used)
            if found is not None and found.kind == "generator" and found.model is None:
                rule = f"this judge of roles.{name} takes the policy's weights, so the policy judges itself"
                yield Problem(("roles", used, "model"), rule, remedy="set model here, unless this is intended")


MANY_STOPS = 100
"""Number of stop texts above which a run warns; no model is known to need more."""


def stop_texts_are_few(checked: Checked) -> Iterator[Problem]:
    """Warn about many stop texts: sampling searches for each of them at every token of every completion."""
    samplings: list[tuple[KeyPath, SamplingConfig | None]] = [(("sampling",), checked.config.sampling)]
    samplings += [((*path, "sampling"), section.sampling) for path, section in sections(checked.config.eval)]
    for section, sampling in samplings:
        if sampling is not None and len(sampling.stop) > MANY_STOPS:
            rule = f"sampling searches for {len(sampling.stop)} stop texts after every token, which makes it slow"
            yield Problem((*section, "stop"), rule, remedy="keep only the stop texts that completions need")


def datasets_differ(checked: Checked) -> Iterator[Problem]:
    """Warn if a dataset occurs twice, in training or in both training and evaluation."""
    seen: dict[tuple[str, str | None, int | None], KeyPath] = {}
    for split, datasets in (("train", checked.config.data.train), ("eval", checked.config.data.eval)):
        for index, dataset in enumerate(datasets):
            path: KeyPath = ("data", split, index, "path")
            earlier = seen.setdefault((dataset.path, dataset.split, dataset.limit), path)
            if earlier == path:
                continue
            if earlier[1] == split:
                rule, remedy = "the same dataset twice", "remove one and add up their weights, or set another split"
            else:
                rule = "the run also trains on this dataset, so its evaluation score says little about other data"
                remedy = "evaluate on rows that the run does not train on"
            yield Problem(path, rule, dataset.path, remedy, ((earlier, dataset.path),))


def warm_up_ends(checked: Checked) -> Iterator[Problem]:
    """Warn if the learning rate does not reach its peak before the run ends."""
    train = checked.config.train
    updates = train.steps * train.epochs * train.mini_batches
    for name, _ in checked.roles("trainer"):
        choice = checked.choices.selected.get(f"roles.{name}")
        warmup = getattr(choice.options, "warmup_steps", 0) if choice is not None else 0
        if isinstance(warmup, int) and warmup >= updates:
            rule = f"the run has {updates} optimizer steps, so the learning rate never reaches its peak"
            path: KeyPath = ("roles", name, "options", "warmup_steps")
            yield Problem(path, rule, warmup, "lower it, or train longer", ((("train", "steps"), train.steps),))


def stale_tokens_are_known(checked: Checked) -> Iterator[Problem]:
    """Warn if rollouts may contain tokens of older weights and the algorithm does not declare whether it corrects for
    them.
    """
    algorithm, rollout = checked.choices.selected.get("algorithm"), checked.config.rollout
    setting = "max_staleness" if rollout.partial == "none" else "partial"
    value = getattr(rollout, setting)
    if value and value != "none" and algorithm is not None and not hasattr(algorithm.options, "stale_tokens"):
        rule = (
            "the run trains on tokens sampled by older weights, and this algorithm does not declare whether it "
            "corrects for that (attribute stale_tokens of its options)"
        )
        related: Related = ((("algorithm", "name"), checked.config.algorithm.name),)
        yield Problem(("rollout", setting), rule, value, related=related)


CAUTION_RULES: tuple[Rule, ...] = (
    options_are_meant,
    logprobs_compare,
    sampling_repeats,
    judges_hold_still,
    stop_texts_are_few,
    datasets_differ,
    warm_up_ends,
    stale_tokens_are_known,
)
