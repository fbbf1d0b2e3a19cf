"""Rules about paths: a path that no file system accepts, or that cannot serve its purpose, is refused before the
run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from chatlearn_config.problems import KeyPath, Problem
from chatlearn_core.config.models import ModelConfig
from chatlearn_core.config.rules.checked import Checked, Rule

MAX_NAME_BYTES = 255
"""Limit of the usual file systems for one part of a path."""
MAX_PATH_BYTES = 4095
"""Linux's PATH_MAX, without the NUL at its end."""
ROOM_BELOW_BYTES = 512
"""Length reserved for the paths of the run's own files below ``output_dir``."""


def paths_can_exist(checked: Checked) -> Iterator[Problem]:
    """Every path must be valid for a file system, and its ``~user`` must exist and have a home."""
    for path, text in _paths(checked):
        longest = MAX_PATH_BYTES - (ROOM_BELOW_BYTES if path == ("output_dir",) else 0)
        try:
            expanded = Path.cwd() / Path(text).expanduser()
        except RuntimeError:
            user = text.partition("/")[0]
            rule = f"{user!r} means the home directory of a user who does not exist"
            yield Problem(path, rule, text, "write the directory out, or ./~name for a file of that name")
            continue
        longest_name = max(len(os.fsencode(part)) for part in expanded.parts)
        if longest_name > MAX_NAME_BYTES:
            rule = f"has a part of {longest_name} bytes; file systems take names of up to {MAX_NAME_BYTES}"
            yield Problem(path, rule, text, "shorten it")
        elif len(os.fsencode(expanded)) > longest:
            rule = f"has {len(os.fsencode(expanded))} bytes; a path may have {longest}"
            yield Problem(path, rule, text, "shorten it")
        elif text.startswith("~") and not text.startswith("~/") and text != "~" and not _home_of(text).exists():
            rule = f"{text.partition('/')[0]!r} means {_home_of(text)}, which does not exist"
            yield Problem(path, rule, text, "write the directory out, or ./~name for a file of that name")


def _home_of(text: str) -> Path:
    return Path(text.partition("/")[0]).expanduser()


def output_is_a_directory(checked: Checked) -> Iterator[Problem]:
    """``output_dir``, and everything above it, must be a directory or not exist yet."""
    path, text = ("output_dir",), checked.config.output_dir
    try:
        wanted = Path(text).expanduser().absolute()
        there = next(place for place in (wanted, *wanted.parents) if place.exists())
        if there.is_dir():
            return
        kind = "file" if there.is_file() else "device" if there.is_char_device() or there.is_block_device() else "pipe"
    except (OSError, RuntimeError, ValueError):
        return  # an invalid path, which another rule reports; or one that only the run's user may access
    if there == wanted:
        rule = f"is a {kind}; it must be a directory"
    else:
        rule = f"lies below {there}, which is not a directory"
    yield Problem(path, rule, text, "choose another directory, or one that does not exist yet")


def _paths(checked: Checked) -> Iterator[tuple[KeyPath, str]]:
    config = checked.config
    yield ("output_dir",), config.output_dir
    models: list[tuple[KeyPath, ModelConfig]] = [(("model",), config.model)]
    models += [(("roles", name, "model"), role.model) for name, role in config.roles.items() if role.model is not None]
    for section, model in models:
        yield (*section, "path"), model.path
        if model.tokenizer is not None:
            yield (*section, "tokenizer"), model.tokenizer
    for split, datasets in (("train", config.data.train), ("eval", config.data.eval)):
        for index, dataset in enumerate(datasets):
            yield ("data", split, index, "path"), dataset.path


PATH_RULES: tuple[Rule, ...] = (paths_can_exist, output_is_a_directory)
