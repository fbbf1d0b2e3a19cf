"""Rules about settings that depend on another setting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from chatlearn_config.problems import KeyPath, Problem
from chatlearn_core.config.models import ModelConfig
from chatlearn_core.config.rules.checked import Checked, Related, Rule


def nothing_is_empty(checked: Checked) -> Iterator[Problem]:
    """Names and paths must not be empty."""
    config = checked.config
    texts: list[tuple[KeyPath, str | None]] = [
        (("name",), config.name),
        (("output_dir",), config.output_dir),
        (("algorithm", "name"), config.algorithm.name),
        (("weight_sync", "backend"), config.weight_sync.backend),
        (("runtime", "backend"), config.runtime.backend),
        (("checkpoint", "metric"), config.checkpoint.metric),
    ]
    models: list[tuple[KeyPath, ModelConfig | None]] = [(("model",), config.model)]
    models.extend((("roles", name, "model"), role.model) for name, role in config.roles.items())
    for path, model in models:
        if model is not None:
            texts.extend([((*path, "path"), model.path), ((*path, "tokenizer"), model.tokenizer)])
    for split, datasets in (("train", config.data.train), ("eval", config.data.eval)):
        for index, dataset in enumerate(datasets):
            texts.append((("data", split, index, "path"), dataset.path))
            texts.append((("data", split, index, "format"), dataset.format))
    for name, role in config.roles.items():
        texts.extend(
            (("roles", name, "parts", index, "backend"), part.backend) for index, part in enumerate(role.parts)
        )
    texts.extend((("log", "loggers", index, "name"), logger.name) for index, logger in enumerate(config.log.loggers))
    for path, text in texts:
        if text is not None and not text.strip():
            yield Problem(path, "must not be empty", text)


def auto_format_takes_no_options(checked: Checked) -> Iterator[Problem]:
    """Options of a dataset require a named format."""
    data = checked.config.data
    for split, datasets in (("train", data.train), ("eval", data.eval)):
        for index, dataset in enumerate(datasets):
            if dataset.format == "auto" and dataset.options:
                path: KeyPath = ("data", split, index)
                related: Related = (((*path, "format"), "auto"),)
                rule = "options belong to a named format, and format is 'auto'"
                remedy = "name the format, or remove options"
                yield Problem((*path, "options"), rule, dataset.options, remedy, related)


def evaluation_has_data(checked: Checked) -> Iterator[Problem]:
    """Evaluation settings require evaluation data."""
    config = checked.config
    data: Related = ((("data", "eval"), []),)
    if config.data.eval:
        return
    remedy = "add data.eval, or remove this setting"
    if config.eval.every > 0:
        rule = "configures evaluation, but there is no data.eval"
        yield Problem(("eval", "every"), rule, config.eval.every, remedy, data)
    if config.eval.sampling is not None:
        rule = "configures evaluation, but there is no data.eval"
        yield Problem(("eval", "sampling"), rule, remedy=remedy, related=data)


def best_metric_is_produced(checked: Checked) -> Iterator[Problem]:
    """Keeping the best checkpoints requires the metric that ranks them."""
    config = checked.config
    keep, metric = config.checkpoint.keep_best, config.checkpoint.metric
    if keep == 0 or not metric.startswith("eval/"):
        return
    path: KeyPath = ("checkpoint", "keep_best")
    ranked: tuple[KeyPath, Any] = (("checkpoint", "metric"), metric)
    if not config.data.eval:
        rule = f"ranks checkpoints by '{metric}', which is never measured: there is no data.eval"
        remedy = "add data.eval, set another metric (reward), or set keep_best to 0"
        yield Problem(path, rule, keep, remedy, (ranked, (("data", "eval"), [])))
    elif config.eval.every == 0 and not config.eval.at_end:
        rule = f"ranks checkpoints by '{metric}', which is not measured after training starts"
        related: Related = (ranked, (("eval", "every"), 0), (("eval", "at_end"), False))
        yield Problem(path, rule, keep, "set eval.every, or set keep_best to 0", related)


SETTING_RULES: tuple[Rule, ...] = (
    nothing_is_empty,
    auto_format_takes_no_options,
    evaluation_has_data,
    best_metric_is_produced,
)
