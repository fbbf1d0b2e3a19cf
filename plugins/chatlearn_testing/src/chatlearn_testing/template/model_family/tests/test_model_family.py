from __future__ import annotations

from pathlib import Path

import pytest
from chatlearn_core.exceptions import DataError, ModelError
from chatlearn_core.protocols import ModelSource
from chatlearn_testing.suites import ModelFamilyConformance

from acme_plugin.conformance import SETTINGS, VOCAB_SIZE, build_model
from acme_plugin.family import CONFIG_FILE, AcmeFamily
from acme_plugin.options import AcmeOptions
from acme_plugin.tokenizer import AcmeTokenizer


class TestConformance(ModelFamilyConformance):
    backend = "acme"
    cases = SETTINGS["model_family/acme"]["cases"]


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    directory = str(build_model(tmp_path / "model"))
    return ModelSource(directory, directory)


def test_a_conversation_ends_every_turn(source: ModelSource) -> None:
    family = AcmeFamily(AcmeOptions())
    renderer = family.renderer(family.load_tokenizer(source))
    rendered = renderer.prompt([{"role": "user", "content": "2+2?"}])
    assert rendered.text == "<|user|>2+2?<|end|><|assistant|>"
    assert renderer.end_of_turn_id == AcmeTokenizer.eos_token_id


def test_a_character_without_a_token_is_refused() -> None:
    with pytest.raises(DataError, match="'ä' has no token"):
        AcmeTokenizer("abc").encode("ä")


@pytest.mark.parametrize("value", ['"many"', "0", "null"])
def test_a_vocabulary_that_is_no_number_is_refused(source: ModelSource, value: str) -> None:
    file = Path(source.path) / CONFIG_FILE
    file.write_text(file.read_text().replace(str(VOCAB_SIZE), value))
    with pytest.raises(ModelError, match="says vocab_size"):
        AcmeFamily(AcmeOptions()).facts(source)
