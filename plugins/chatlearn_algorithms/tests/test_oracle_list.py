"""Every case of the published list of oracles is checked by a test, or docs/algorithms.md says why it is left out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
FILES = ("oracles.json", "policy_gradient_oracles.json", "preference_oracles.json")
"""Each has a test module that checks every case or explains the difference."""
ELSEWHERE = {"repetition penalty": "plugins/chatlearn_rewards/tests/test_rule_rewards.py"}
LEFT_OUT = {
    "OPO": "advantages of OPO, GPG and GRPO pass@k",
    "GPG": "advantages of OPO, GPG and GRPO pass@k",
    "GRPO pass@k": "advantages of OPO, GPG and GRPO pass@k",
    "ReMax": "advantage of ReMax",
    "DRO": "objectives DRO, GMPO and KL-Cov",
    "GMPO": "objectives DRO, GMPO and KL-Cov",
    "KL-Cov": "objectives DRO, GMPO and KL-Cov",
    "SAPO": "objective SAPO",
    "VESPO": "objective VESPO",
    "DPPO": "DPPO (TV and KL)",
    "DPPO-TV": "DPPO (TV and KL)",
    "DPPO-KL": "DPPO (TV and KL)",
    "DPPO with squared log-ratio KL": "DPPO (TV and KL), with squared log-ratio",
    "symmetric trust region (prime-rl 'ipo')": "the symmetric trust region (`ipo` of prime-rl)",
    "VAPO length-adaptive lambda": "length-adaptive λ and likelihood of positive examples (VAPO)",
    "VAPO positive-example NLL": "length-adaptive λ and likelihood of positive examples (VAPO)",
    "batch-normalised IS weights": "importance weights divided by their mean",
    "rejection by divergence": "rejection by a divergence (k2, k3, binary KL)",
    "rejection sampling": "rejection by a divergence (k2, k3, binary KL)",
    "binary KL (KPop)": "binary KL of AReaL's KPop",
    "token rejection, weights 1": "rejection of tokens at weight 1",
    "outlier rejection of sequences": "rejection of a sequence for one token",
    "off-policy sequence masking (OPSM)": "masks of off-policy sequences with a negative advantage (OPSM)",
    "off-policy sequence masking": "masks of off-policy sequences with a negative advantage (OPSM)",
    "high-entropy tokens only": "loss on tokens of high entropy only",
    "token-sum aggregation": "a sum over tokens times the number of ranks",
    "KL abs": "log π − log ref",
    "staleness capacity": "capacity for new prompts",
}
"""Algorithm of the list -> what stands in the row of docs/algorithms.md that explains it."""


def test_the_document_explains_what_is_left_out() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    for name, words in LEFT_OUT.items():
        assert any(words in row for row in rows), name


def test_every_case_is_checked_or_explained() -> None:
    folder = os.environ.get("CHATLEARN_TEST_DATA")
    file = Path(folder or "").resolve().parent / "oracles" / "cases.json"
    if not folder or not file.is_file():
        pytest.skip("CHATLEARN_TEST_DATA does not name a folder beside oracles/cases.json")
    listed: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    checked = {case["id"]: case for name in FILES for case in json.loads(Path(__file__).with_name(name).read_text())}
    unexplained = []
    for case in listed:
        if case["id"] in checked:
            for part in ("inputs", "settings", "expected"):
                assert checked[case["id"]][part] == case[part], f"{case['id']}: its {part} were changed"
        elif case["algorithm"] in ELSEWHERE:
            assert str(case["inputs"]["completion_ids"]) in (ROOT / ELSEWHERE[case["algorithm"]]).read_text()
        elif case["algorithm"] not in LEFT_OUT:
            unexplained.append(case["id"])
    assert not unexplained
