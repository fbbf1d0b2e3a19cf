"""Rules about evaluation sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from chatlearn_config.problems import KeyPath, Problem
from chatlearn_core.config.models import DataConfig, EvalConfig, EvalSetConfig, RunConfig
from chatlearn_core.config.rules.checked import Checked, Related, Rule
from chatlearn_core.plugins.sources import did_you_mean


def eval_dataset_names(data: DataConfig) -> list[str]:
    """The name of each eval dataset as evaluation sets write it: its ``name``, or the stem of its path."""
    return [dataset.name or PurePath(dataset.path).stem for dataset in data.eval]


def datasets_of_sets(config: RunConfig) -> Mapping[str, tuple[int, ...]]:
    """Evaluation set -> indices of its datasets in ``data.eval``. The name of the set of all other datasets is empty;
    without such datasets there is no such set.
    """
    names = eval_dataset_names(config.data)
    found = {
        name: tuple(index for index, dataset in enumerate(names) if dataset in one.datasets)
        for name, one in config.eval.sets.items()
    }
    rest = tuple(index for index in range(len(names)) if not any(index in of_set for of_set in found.values()))
    return {"": rest, **found} if rest else found


def with_defaults(settings: EvalConfig, name: str) -> EvalSetConfig:
    """The settings of a set; what it leaves out comes from ``eval``."""
    general = {key: getattr(settings, key) for key in ("sampling", "samples_per_prompt", "k", "pass_threshold")}
    if not name:
        return EvalSetConfig.model_construct(datasets=[], reward=None, **general)
    own = settings.sets[name]
    return own.model_copy(update={key: value for key, value in general.items() if getattr(own, key) is None})


def sections(settings: EvalConfig) -> Iterator[tuple[KeyPath, EvalConfig | EvalSetConfig]]:
    """``eval`` and the section of each set, with their paths."""
    yield ("eval",), settings
    yield from ((("eval", "sets", name), one) for name, one in settings.sets.items())


def sets_name_what_exists(checked: Checked) -> Iterator[Problem]:
    """The datasets and the reward of an evaluation set must exist."""
    config = checked.config
    names = eval_dataset_names(config.data)
    rewards = [name for name, _ in checked.roles("reward")]
    for name, one in config.eval.sets.items():
        path: KeyPath = ("eval", "sets", name)
        if not name.strip() or "/" in name or name == "dataset":
            rule = "the name of an evaluation set is part of its metrics' names: it must not be empty, 'dataset', or "
            yield Problem(path, rule + "hold a '/'", name, "choose another name")
        for index, dataset in enumerate(one.datasets):
            at: KeyPath = (*path, "datasets", index)
            if dataset not in names:
                known = f"data.eval has {', '.join(names)}" if names else "data.eval is empty"
                rule = f"names no dataset of data.eval;{did_you_mean(dataset, names)} {known}"
                yield Problem(at, rule, dataset, "correct it, or add the dataset to data.eval")
            elif names.count(dataset) > 1:
                rule = f"names {names.count(dataset)} datasets of data.eval"
                yield Problem(at, rule, dataset, "give each of them a different name (data.eval.N.name)")
            elif dataset in one.datasets[:index]:
                yield Problem(at, "names the dataset twice", dataset, "remove one")
        if one.reward is not None and one.reward not in rewards:
            known = f"there are {', '.join(rewards)}" if rewards else "there is none"
            rule = f"names no role of kind reward;{did_you_mean(one.reward, rewards)} {known}"
            yield Problem((*path, "reward"), rule, one.reward, f"correct it, or add roles.{one.reward}")


def several_samples_of_a_set_differ(checked: Checked) -> Iterator[Problem]:
    """Several completions of one prompt must be sampled at a temperature above 0, and k of them must exist."""
    config = checked.config
    if not config.data.eval:
        return
    for path, section in sections(config.eval):
        name = "" if path == ("eval",) else str(path[-1])
        settings = with_defaults(config.eval, name)
        several, sampling = settings.samples_per_prompt or 1, settings.sampling
        number: tuple[KeyPath, Any] = ((*path, "samples_per_prompt"), several)
        if section.samples_per_prompt is None:
            number = (("eval", "samples_per_prompt"), several)
        told = name and section.samples_per_prompt is None and section.sampling is None  # the general keys' problem
        if several > 1 and (sampling is None or sampling.temperature == 0) and not told:
            greedy: tuple[KeyPath, Any] = ((*path, "sampling"), None)
            if sampling is not None:
                place = path if section.sampling is not None else ("eval",)
                greedy = ((*place, "sampling", "temperature"), sampling.temperature)
            rule = f"evaluation is greedy: the {several} samples of a prompt would all be the same"
            where = ".".join(map(str, path))
            remedy = f"set {where}.sampling with a temperature above 0, or remove samples_per_prompt"
            yield Problem(number[0], rule, several, remedy, (greedy,))
        too_many = [k for k in settings.k or () if k > several]
        if too_many and not (name and section.k is None and section.samples_per_prompt is None):
            key: KeyPath = (*path, "k") if section.k is not None else ("eval", "k")
            related: Related = (number,)
            rule = f"k samples of a prompt are drawn from its {several}, so {too_many[0]} are too many"
            yield Problem(key, rule, settings.k, "lower k, or raise samples_per_prompt", related)


EVALUATION_RULES: tuple[Rule, ...] = (sets_name_what_exists, several_samples_of_a_set_differ)
