"""A role is refused whose token ids mean something else; the names of both directories are in the message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chatlearn_core.exceptions import ModelError
from chatlearn_core.executor.role_models import check_role_models, check_same_tokenizer
from chatlearn_core.protocols import ModelSource
from chatlearn_core.protocols.model_family import ModelFacts

VOCAB = {"a": 0, "b": 1, "<eos>": 2}


def compare(theirs: dict[str, int]) -> None:
    check_same_tokenizer("reference", ModelSource("other", "other"), tokenizer(theirs), RUN, tokenizer(VOCAB))


RUN = ModelSource("run", "run")


def tokenizer(vocab: dict[str, int]) -> Any:
    return SimpleNamespace(get_vocab=lambda: vocab)


def test_more_tokens_are_no_other_tokenizer() -> None:
    compare(dict(VOCAB))
    compare(VOCAB | {"<pad>": 3})


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        ({"b": 0, "a": 1, "<eos>": 2}, "2 are not those of other .* id 0 is 'a' here and 'b' there, id 1 is 'b' here"),
        ({"a": 0, "b": 1}, "1 are not those of other .* id 2 is '<eos>' here and nothing there"),
        ({"a": 0, "b": 1, "</s>": 2}, "id 2 is '<eos>' here and '</s>' there"),
    ],
    ids=["swapped", "missing", "another"],
)
def test_another_meaning_of_an_id_is_refused_by_both_directories(theirs: dict[str, int], difference: str) -> None:
    with pytest.raises(ModelError, match=rf"role 'reference' has another tokenizer.*of run \(here\), .*{difference}"):
        compare(theirs)


def models(**paths: tuple[str, str | None]) -> Any:
    """A configuration whose roles have models of these directories and tokenizers."""

    def model(path: str, of_tokenizer: str | None) -> Any:
        return SimpleNamespace(path=path, tokenizer=of_tokenizer, max_length=None, trust_remote_code=False)

    roles = {name: SimpleNamespace(kind="trainer", head="lm", model=model(*paths[name])) for name in paths}
    roles["policy"] = SimpleNamespace(kind="trainer", head="lm", model=None)
    roles["judge"] = SimpleNamespace(kind="reward", head="lm", model=None)
    return SimpleNamespace(source="run.yaml", config=SimpleNamespace(model=model("run", None), roles=roles))


class Family:
    """Reads directories that are not there: ``other`` has another tokenizer, ``wide`` more rows."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def facts(self, source: ModelSource) -> Any:
        return ModelFacts("bigram", 64, 12 if source.path == "wide" else 8)

    def load_tokenizer(self, source: ModelSource) -> Any:
        self.loaded.append(source.tokenizer_path)
        return tokenizer({"b": 0, "a": 1, "<eos>": 2} if source.tokenizer_path == "other" else VOCAB)


def check(loaded: Any, family: Family) -> dict[str, int]:
    own = ModelFacts("bigram", 64, 8)
    known = check_role_models(loaded, family, loaded.config.roles, tokenizer(VOCAB), own)  # type: ignore[arg-type]  # what is used
    return {name: facts.vocab_size for name, facts in known.items()}


def test_sizes_are_those_of_each_roles_model_and_a_shared_tokenizer_is_not_read_again() -> None:
    family = Family()
    loaded = models(reference=("wide", None), critic=("wide", "run"), same=("run", None))
    assert check(loaded, family) == {"reference": 12, "critic": 12, "same": 8, "policy": 8}
    assert family.loaded == ["wide"]


@pytest.mark.parametrize(("model", "key"), [(("other", None), "path"), (("wide", "other"), "tokenizer")])
def test_the_setting_that_asked_for_it_is_named(model: tuple[str, str | None], key: str) -> None:
    with pytest.raises(ModelError, match=rf"run\.yaml, roles\.reference\.model\.{key}: role 'reference' has another"):
        check(models(reference=model), Family())
