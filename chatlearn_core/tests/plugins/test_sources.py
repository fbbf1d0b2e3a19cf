from __future__ import annotations

import pytest

from chatlearn_core.plugins.sources import DisabledDistributions, core_version_problem, did_you_mean, installed_sources


def test_sources_are_found_without_importing(fake_environment) -> None:
    fake_environment.install("Acme-Rewards", "raise AssertionError('imported')", version="0.3.0")
    fake_environment.install("unrelated", entry_points="[console_scripts]\nchatlearn-tool = m:f\n")
    names = {(source.name, source.distribution, source.version) for source in installed_sources()}
    assert ("acme_rewards", "Acme-Rewards", "0.3.0") in names
    assert ("core", "chatlearn-core") in {(name, distribution) for name, distribution, _ in names}
    assert "unrelated" not in {distribution for _, distribution, _ in names}


def test_a_distribution_found_twice_counts_once(fake_environment, tmp_path, monkeypatch) -> None:
    """As when a development checkout shadows an installed release: the first on the path is what Python imports."""
    fake_environment.install("acme-rewards", "", version="2.0")
    shadowing = type(fake_environment)(tmp_path / "checkout")
    shadowing.install("Acme_Rewards", "", version="3.0")
    monkeypatch.syspath_prepend(str(shadowing.site))
    found = [source.version for source in installed_sources() if source.name == "acme_rewards"]
    assert found == ["3.0"]


@pytest.mark.parametrize("requires", [[], ["chatlearn-core>=0.1"], ["torch<1"], ["ChatLearn_Core<0.1; extra == 'old'"]])
def test_requirements_that_this_core_meets(requires) -> None:
    assert core_version_problem(requires, core_version="0.3.0") == ""


@pytest.mark.parametrize("requires", [["chatlearn-core<0.2"], ["not a requirement!", "ChatLearn_Core ~= 0.2.0"]])
def test_requirements_that_exclude_this_core(requires) -> None:
    assert core_version_problem(requires, core_version="0.3.0").endswith("; installed: chatlearn-core 0.3.0")


def test_disabled_distributions_are_compared_normalised() -> None:
    disabled = DisabledDistributions.from_environment({"CHATLEARN_DISABLE_PLUGINS": " acme_Rewards,b.c ,"})
    assert "ACME-rewards" in disabled
    assert "b-c" in disabled
    assert "acme" not in disabled
    assert not DisabledDistributions.from_environment({}).names


def test_the_nearest_name() -> None:
    assert did_you_mean("vlm", ["vllm", "transformers"]) == " Did you mean 'vllm'?"
    assert did_you_mean("vlm", ["sglang"]) == ""
