"""Checks the models of roles with a model of their own: token ids must mean the same to all of them.

Roles exchange ids, not text: a reference with another tokenizer would compute the logprobs of other words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.data.tokenizer import Tokenizer
from chatlearn_core.exceptions import ModelError
from chatlearn_core.executor.planning import model_source
from chatlearn_core.protocols import ModelSource
from chatlearn_core.protocols.model_family import ModelFacts, ModelFamily

_EXAMPLES = 3
"""Number of ids that an error names."""


@contextmanager
def asked_for_by(where: str) -> Iterator[None]:
    """Add the configuration key to errors of code that reads models, which knows only directories."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error


def check_role_models(
    loaded: LoadedConfig,
    family: ModelFamily,
    roles: Collection[str],
    tokenizer: Tokenizer,
    facts: ModelFacts,
    by_text: Collection[str] = (),
) -> dict[str, ModelFacts]:
    """Facts about the model of each trainer and generator role.

    Args:
        family: reads model directories.
        roles: the used roles.
        tokenizer: the run's tokenizer, which encodes prompts.
        facts: facts about the run's model.
        by_text: roles that receive text, and so may have another tokenizer.

    Raises:
        ModelError: a role's own model cannot be read, or its tokenizer maps an id of the run's to another token.
    """
    config = loaded.config
    known: dict[str, ModelFacts] = {}
    own = model_source(config.model, config.model)
    for name in roles:
        role = config.roles[name]
        if role.kind not in ("trainer", "generator"):
            continue
        known[name] = facts
        if role.model is None:
            continue
        source = model_source(role.model, config.model, role.head)
        where = f"{loaded.source}, roles.{name}.model"
        if source.path != own.path:
            with asked_for_by(f"{where}.path"):
                known[name] = family.facts(source)
        if source.tokenizer_path != own.tokenizer_path and name not in by_text:
            with asked_for_by(f"{where}.{'tokenizer' if role.model.tokenizer else 'path'}"):
                check_same_tokenizer(name, source, family.load_tokenizer(source), own, tokenizer)
    return known


def check_same_tokenizer(
    role: str, source: ModelSource, tokenizer: Tokenizer, run_source: ModelSource, run_tokenizer: Tokenizer
) -> None:
    """Check that every token of the run's vocabulary has the same id in the role's, which may have more tokens.

    Raises:
        ModelError: names both directories and the first ids that differ.
    """
    theirs, ours = tokenizer.get_vocab(), run_tokenizer.get_vocab()
    if ours.items() <= theirs.items():
        return
    differences = _differences(ours, theirs)
    examples = ", ".join(
        f"id {index} is {token!r} here and {'nothing' if other is None else repr(other)} there"
        for index, token, other in differences[:_EXAMPLES]
    )
    raise ModelError(
        f"role {role!r} has another tokenizer than the run, but receives the run's token ids: of the {len(ours)} "
        f"tokens of {run_source.tokenizer_path} (here), {len(differences)} are not those of {source.tokenizer_path} "
        f"(there): {examples}. Give the role a model that was trained with the run's tokenizer; if it was, and only "
        f"its tokenizer files are wrong, set roles.{role}.model.tokenizer to {run_source.tokenizer_path}"
    )


def _differences(ours: Mapping[str, int], theirs: Mapping[str, int]) -> list[tuple[int, str, str | None]]:
    """(id, token in ours, token in theirs) where they differ, by id."""
    token_of = {index: token for token, index in theirs.items()}
    return sorted((index, token, token_of.get(index)) for token, index in ours.items() if theirs.get(token) != index)
