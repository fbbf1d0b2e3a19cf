"""Round trips of a layout, right and with one fault each; they run in a process of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from chatlearn_core.exceptions import ModelError
from chatlearn_testing.fakes.bigram import TRANSITION, UNIGRAM, read_bigram_tensors

LAYOUT = {TRANSITION: "table.weight", UNIGRAM: "table.bias"}
NOTHING = None


def right(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    """Hold the tensors under other names, and give them back; a head takes the place of the bias."""
    tensors = read_bigram_tensors(directory)
    size = tensors[UNIGRAM].shape[0]
    for name, shape in ((TRANSITION, (size, size)), (UNIGRAM, (size,))):
        if tuple(tensors[name].shape) != shape:
            raise ModelError(f"{directory}: {name} has the shape {list(tensors[name].shape)}")
    held = {layout[name]: tensor for name, tensor in tensors.items()}
    found = {name: held[place] for name, place in layout.items()}
    if head != "lm":
        del found[UNIGRAM]
        found["score.weight"] = torch.zeros(1, tensors[UNIGRAM].shape[0])
    return found


def loses_a_tensor(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    return {name: tensor for name, tensor in right(layout, directory, head).items() if name != UNIGRAM}


def adds_a_tensor(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    return {**right(layout, directory, head), "rotary.inv_freq": torch.ones(2)}


def renames_a_tensor(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    return {name.replace("bias", "b"): tensor for name, tensor in right(layout, directory, head).items()}


def transposes(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    return {name: tensor.t() for name, tensor in right(layout, directory, head).items()}


def narrows(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    return {name: tensor.bfloat16().float() for name, tensor in right(layout, directory, head).items()}


def another_type(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    return {name: tensor.double() for name, tensor in right(layout, directory, head).items()}


def flattens(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    return {name: tensor.flatten() for name, tensor in right(layout, directory, head).items()}


def changes_the_last_bits(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    found = dict(right(layout, directory, head))
    found[TRANSITION] = found[TRANSITION].clone()
    found[TRANSITION][0, 0] *= 1 + 2**-22
    return found


def wide_head(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    found = dict(right(layout, directory, head))
    return found | ({"score.weight": torch.zeros(2, 32)} if head != "lm" else {})


def no_head(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    return right(layout, directory, "lm")


def head_spoils_the_trunk(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    found = dict(right(layout, directory, head))
    return found if head == "lm" else found | {TRANSITION: found[TRANSITION] * 2}


def refuses_every_head(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    if head != "lm":
        raise ModelError("no head at all")
    return right(layout, directory, head)


def takes_what_is_missing(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    try:
        return right(layout, directory, head)
    except ModelError:
        return {name: torch.zeros(32) for name in layout}


def raises_anything(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    try:
        return right(layout, directory, head)
    except ModelError as error:
        raise KeyError(str(error)) from error


def ends_the_process(layout: Mapping[str, str], directory: Path, head: str) -> Mapping[str, Tensor]:
    os._exit(3)
