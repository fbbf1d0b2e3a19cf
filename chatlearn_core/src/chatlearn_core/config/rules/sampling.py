"""Rules about sampling: lengths, groups, mini-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from chatlearn_config.problems import KeyPath, Problem
from chatlearn_core.config.rules.checked import Checked, Related, Rule
from chatlearn_core.config.rules.evaluation import sections
from chatlearn_core.plugins.compatibility import bases_of
from chatlearn_core.plugins.records import AlgorithmSpec, GeneratorSpec


def completion_fits_model(checked: Checked) -> Iterator[Problem]:
    """Prompt and completion together must fit into the longest sequence of the generators' models."""
    config = checked.config
    samplings: list[tuple[KeyPath, int]] = [(("sampling", "max_tokens"), config.sampling.max_tokens)]
    samplings += [
        ((*at, "sampling", "max_tokens"), one.sampling.max_tokens)
        for at, one in sections(config.eval)
        if one.sampling is not None
    ]
    told: set[tuple[KeyPath, KeyPath]] = set()
    for name, _ in checked.roles("generator"):
        section, model = checked.model_of(name)
        if model.max_length is None:
            continue
        limit_path = (*section, "max_length")
        limit: tuple[KeyPath, Any] = (limit_path, model.max_length)
        for path, tokens in samplings:
            if (path, limit_path) in told:
                continue
            told.add((path, limit_path))
            prompt = config.data.max_prompt_tokens
            if tokens >= model.max_length:
                rule = "leaves no room for a prompt: it must be less than the longest sequence"
                yield Problem(path, rule, tokens, "lower max_tokens or raise max_length", (limit,))
            elif prompt is not None and prompt + tokens > model.max_length:
                rule = (
                    f"{prompt} prompt tokens and {tokens} completion tokens are more than the longest sequence, "
                    f"{model.max_length}"
                )
                related: Related = ((("data", "max_prompt_tokens"), prompt), limit)
                yield Problem(path, rule, tokens, "lower one of the two or raise max_length", related)


def several_samples_differ(checked: Checked) -> Iterator[Problem]:
    """Several completions of one prompt must be sampled at a temperature above 0 (evaluation: ``evaluation.py``)."""
    config = checked.config
    algorithm = checked.choices.selected.get("algorithm")
    group_size = getattr(algorithm.options, "group_size", 1) if algorithm is not None else 1
    if isinstance(group_size, int) and group_size > 1 and config.sampling.temperature == 0:
        rule = f"greedy sampling makes all {group_size} completions of a group the same: no reward differs within it"
        related: Related = ((("algorithm", "options", "group_size"), group_size),)
        remedy = "set a temperature above 0 (1.0 samples from the policy itself), or group_size to 1"
        yield Problem(("sampling", "temperature"), rule, config.sampling.temperature, remedy, related)


def mini_batches_have_samples(checked: Checked) -> Iterator[Problem]:
    """A step must have at least one sample for each of its mini-batches."""
    train = checked.config.train
    algorithm = checked.choices.selected.get("algorithm")
    if algorithm is None:
        return
    group_size = getattr(algorithm.options, "group_size", 1)
    if not isinstance(group_size, int) or train.mini_batches <= train.prompts_per_step * group_size:
        return
    samples = train.prompts_per_step * group_size
    related: list[tuple[KeyPath, Any]] = [(("train", "prompts_per_step"), train.prompts_per_step)]
    if hasattr(algorithm.options, "group_size"):
        related.append((("algorithm", "options", "group_size"), group_size))
    rule = f"a step has {samples} samples, fewer than its mini-batches"
    remedy = f"set mini_batches to {samples} or less, or draw more prompts a step"
    yield Problem(("train", "mini_batches"), rule, train.mini_batches, remedy, tuple(related))


def compared_logprobs_have_one_basis(checked: Checked) -> Iterator[Problem]:
    """An algorithm that compares generator logprobs with the trainer's needs both of the distribution sampled from."""
    sampling = checked.config.sampling
    algorithm = checked.choices.selected.get("algorithm")
    if algorithm is None or not isinstance(algorithm.record, AlgorithmSpec) or sampling.temperature == 0:
        return
    if not getattr(algorithm.options, "compares_generator_logprobs", algorithm.record.compares_generator_logprobs):
        return
    related: Related = ((("algorithm", "name"), checked.config.algorithm.name),)
    whose = "the algorithm compares the generator's logprobs with the trainer's, which are those at the temperature, of"
    for name, value, off in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0)):
        if value != off:
            rule = f"{whose} all tokens; what is left of them by {name} is another distribution"
            yield Problem(("sampling", name), rule, value, f"set it to {off:g}", related)
    for role, config in checked.roles("generator"):
        choice = checked.choices.selected.get(f"roles.{role}")
        if choice is None or not isinstance(choice.record, GeneratorSpec) or config.model is not None:
            continue
        if sampling.temperature != 1 and "processed" not in bases_of(choice.record, choice.options):
            rule = f"{whose} which '{choice.record.name}' returns none: its logprobs are of the raw distribution"
            remedy = "set the generator's option for processed logprobs, if it has one, or sample at temperature 1"
            generator: Related = (*related, (("roles", role, "backend"), config.backend))
            yield Problem(("sampling", "temperature"), rule, sampling.temperature, remedy, generator)


SAMPLING_RULES: tuple[Rule, ...] = (
    completion_fits_model,
    several_samples_differ,
    mini_batches_have_samples,
    compared_logprobs_have_one_basis,
)
