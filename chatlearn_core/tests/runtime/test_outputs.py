"""Every rule of the records of outputs fails on what breaks it, and says role, plugin, sample and rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import ContractError
from chatlearn_core.flow import FlowVocabulary
from chatlearn_core.plugins.records import OutputSpec
from chatlearn_core.runtime.boundary import Origin
from chatlearn_core.runtime.outputs import check_outputs
from chatlearn_core.types import OutputRequest, TrainBatch, cumulative_lengths

NAN = float("nan")
TRAINER = Origin("policy", "trainer 'acme'")
MARGIN = OutputSpec(name="margin", shape=(2, None), at_least=-1.0, masked=False)
OUTPUTS = FlowVocabulary.builtin().outputs | {"margin": MARGIN}


def make_batch() -> TrainBatch:
    return TrainBatch(
        ("a", "b"),
        torch.arange(5),
        cumulative_lengths([2, 3]),
        torch.tensor([False, True, False, True, True]),
        torch.arange(2),
        torch.arange(2),
        {"chosen": torch.zeros(5, 3, dtype=torch.int64)},
    )


def request(*names: Any) -> OutputRequest:
    return OutputRequest(frozenset(names), arguments={"k": 2, "ids": "chosen"})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("logprobs", torch.tensor([NAN, -1.0, NAN, 0.0, -3.0])),  # prompt tokens have no meaning
        ("logprobs", -torch.ones(5, dtype=torch.bfloat16)),
        ("entropy", torch.ones(5)),
        ("scores", torch.ones(2)),
        ("hidden_states", torch.zeros(5, 8)),
        ("topk_ids", torch.ones(5, 2).long()),
        ("topk_logprobs", -torch.ones(5, 2)),
        ("logprobs_at", torch.tensor([[NAN, -1, -2]] + [[0, -1, -2]] * 4)),
        ("margin", torch.zeros(5, 2, 7)),
    ],
)
def test_good_outputs_pass(name: Any, values: torch.Tensor) -> None:
    check_outputs({name: values}, make_batch(), request(name), TRAINER, OUTPUTS)


@pytest.mark.parametrize("name", ["logprobs", "scores", "topk_logprobs", "margin"])
def test_a_rank_without_a_share_of_the_batch_returns_no_rows(name: str) -> None:
    shape = {"topk_logprobs": (0, 2), "margin": (0, 2, 7)}.get(name, (0,))
    none = torch.zeros(0, dtype=torch.int64)
    batch = TrainBatch((), none, cumulative_lengths([]), none.bool(), none, none, {})
    check_outputs({name: torch.zeros(shape)}, batch, request(name), TRAINER, OUTPUTS)


BAD_OUTPUTS: dict[str, tuple[Any, Any, str]] = {
    "no mapping": ("logprobs", torch.zeros(5), "compute returned a Tensor, not a mapping"),
    "nothing": ("logprobs", {}, "did not return the output 'logprobs', which was requested; it returned nothing"),
    "another output": ("logprobs", {"entropy": torch.ones(5)}, "did not return .*'logprobs'.* it returned entropy"),
    "an array": ("logprobs", {"logprobs": np.zeros(5)}, "returned 'logprobs' as ndarray, not as a tensor"),
    "integers": (
        "logprobs",
        {"logprobs": torch.zeros(5).long()},
        "as torch.int64, not as a tensor of floating",
    ),
    "too short": (
        "logprobs",
        {"logprobs": torch.zeros(4)},
        r"\[4\], not \[5\], for 5 tokens of the samples 'a', 'b'",
    ),
    "too deep": ("logprobs", {"logprobs": torch.zeros(5, 1)}, r"in the shape \[5, 1\], not \[5\]"),
    "a scalar": ("logprobs", {"logprobs": torch.tensor(0.0)}, r"in the shape \[\], not \[5\]"),
    "by token": ("scores", {"scores": torch.zeros(5)}, r"in the shape \[5\], not \[2\], for 2 sequences"),
    "a NaN": (
        "logprobs",
        {"logprobs": torch.tensor([0, 0, 0, NAN, 0])},
        "= nan for sample 'b', token 1; logprobs must",
    ),
    "a probability": ("logprobs", {"logprobs": torch.tensor([0, 0.5, 0, 0, 0])}, "= 0.5 for sample 'a', token 1"),
    "infinite entropy": ("entropy", {"entropy": torch.tensor([0, 0, 0, 0, np.inf])}, "'entropy' = inf for sample 'b'"),
    "a NaN score": (
        "scores",
        {"scores": torch.tensor([0.0, NAN])},
        "'scores' = nan for sample 'b'; scores must",
    ),
    "a negative entropy": ("entropy", {"entropy": torch.tensor([0, 0, 0, -1.0, 0])}, "entropy must be .* at least 0"),
    "too few ids": ("topk_ids", {"topk_ids": torch.ones(5, 1).long()}, r"in the shape \[5, 1\], not \[5, 2\]"),
    "ids as floats": ("topk_ids", {"topk_ids": torch.ones(5, 2)}, "'topk_ids' as torch.float32, .* of int64"),
    "a negative id": ("topk_ids", {"topk_ids": -torch.ones(5, 2).long()}, "'topk_ids' = -1 for sample 'a', token 1"),
    "not one for each id": ("logprobs_at", {"logprobs_at": -torch.ones(5, 2)}, r"\[5, 2\], not \[5, 3\]"),
    "of a plugin": ("margin", {"margin": torch.zeros(5, 3, 7)}, r"\[5, 3, 7\], not \[5, 2, any\]"),
    "of a plugin, at the prompt": ("margin", {"margin": torch.full((5, 2, 1), -2.0)}, "= -2.0 for sample 'a', token 0"),
}


@pytest.mark.parametrize("name", BAD_OUTPUTS)
def test_bad_outputs_are_refused_by_role_plugin_sample_and_rule(name: str) -> None:
    asked, outputs, rule = BAD_OUTPUTS[name]
    with pytest.raises(ContractError, match=f"role 'policy', trainer 'acme': .*{rule}"):
        check_outputs(outputs, make_batch(), request(asked), TRAINER, OUTPUTS)


def test_one_rank_of_several_may_know_nothing() -> None:
    check_outputs({}, make_batch(), request("logprobs"), TRAINER, OUTPUTS, whole=False)
    with pytest.raises(ContractError, match="nan"):
        check_outputs(
            {"logprobs": torch.full((5,), NAN)}, make_batch(), request("logprobs"), TRAINER, OUTPUTS, whole=False
        )


def test_a_rank_with_an_empty_slice_has_empty_outputs() -> None:
    empty = make_batch().select([])
    check_outputs({"logprobs": torch.zeros(0)}, empty, request("logprobs"), TRAINER, OUTPUTS)


def test_what_was_not_asked_for_is_not_looked_at() -> None:
    check_outputs({"logprobs": -torch.ones(5), "mystery": "?"}, make_batch(), request("logprobs"), TRAINER, OUTPUTS)


def test_an_output_that_no_plugin_describes_is_refused() -> None:
    with pytest.raises(ContractError, match=r"'mystery' was asked for, which no installed plugin describes"):
        check_outputs({"mystery": torch.ones(5)}, make_batch(), request("mystery"), TRAINER, OUTPUTS)


def test_data_that_an_output_reads_must_be_there() -> None:
    asked = OutputRequest(frozenset({"logprobs_at"}), arguments={"ids": "teacher_ids"})
    with pytest.raises(ContractError, match=r"reads the token data 'teacher_ids', which the batch does not have"):
        check_outputs({"logprobs_at": -torch.ones(5, 3)}, make_batch(), asked, TRAINER, OUTPUTS)
