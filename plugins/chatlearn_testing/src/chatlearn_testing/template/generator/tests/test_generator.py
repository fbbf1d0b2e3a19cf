from __future__ import annotations

from pathlib import Path

import pytest
from chatlearn_core.exceptions import ModelError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_testing.fakes.bigram import build_bigram_model
from chatlearn_testing.suites import GeneratorConformance

from acme_plugin.conformance import SETTINGS
from acme_plugin.generator import AcmeGenerator
from acme_plugin.options import AcmeOptions


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_bigram_model(tmp_path_factory.mktemp("model"))


class TestConformance(GeneratorConformance):
    backend = "acme"
    load_reference = SETTINGS["generator/acme"]["load_reference"]


def test_a_directory_without_a_model_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    context = RoleContext("generator", ModelSource(str(tmp_path), str(tmp_path)))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        AcmeGenerator(AcmeOptions(), context).setup()
