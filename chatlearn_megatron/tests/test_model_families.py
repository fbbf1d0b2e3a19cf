"""The suite for model families on the layouts of this distribution."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatlearn_core.exceptions import ModelError
from chatlearn_megatron.conformance import SETTINGS, build_family_model, round_trip
from chatlearn_megatron.plugin import chatlearn_model_families
from chatlearn_testing.check import run_conformance

FAMILIES = {record.name: record for record in chatlearn_model_families()}
ORDINARY = "megatron_qwen3_moe"
"""The family with most kinds of parameters; every test of the others starts Megatron-Core in a process, too."""


@pytest.mark.engine
@pytest.mark.parametrize(
    "name", [name if name == ORDINARY else pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES]
)
def test_conforms(name: str) -> None:
    results = run_conformance([FAMILIES[name]], settings=SETTINGS)
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))
    tested = {verdict.test for verdict in results.of("passed")}
    assert {"test_layouts_hold_the_whole_checkpoint", "test_layouts_name_the_other_heads"} <= tested


@pytest.mark.engine
def test_a_head_of_another_name_is_refused(tmp_path: Path) -> None:
    """transformers' GPT-2 for token classification calls its head ``classifier``."""
    from chatlearn_megatron.families import GPT2

    directory = build_family_model(tmp_path / "model", "gpt2")
    with pytest.raises(ModelError, match="GPT2ForTokenClassification names its head otherwise than score"):
        round_trip(GPT2, directory, "value")
