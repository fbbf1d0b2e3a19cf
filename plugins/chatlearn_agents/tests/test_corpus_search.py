"""BM25 against a loop over its formula, and the tool before it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from chatlearn_agents.corpus_search import K1, B, Bm25Index, CorpusSearch, words_of
from chatlearn_agents.options import SearchOptions
from chatlearn_core.exceptions import ConfigError

TEXTS = ["The cat sat on the mat.", "A dog and a cat.", "Dogs bark at dogs, at night.", "Überraschung"]


def score(query: str, number: int) -> float:
    """Sum over the query's words of idf · f (k1 + 1) / (f + k1 (1 - b + b |d| / mean |d|))."""
    documents = [words_of(text) for text in TEXTS]
    mean = sum(map(len, documents)) / len(documents)
    total = 0.0
    for word in set(words_of(query)):
        n, f = sum(word in document for document in documents), documents[number].count(word)
        idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
        total += idf * f * (K1 + 1) / (f + K1 * (1 - B + B * len(documents[number]) / mean))
    return total


@pytest.mark.parametrize("query", ["the cat", "DOGS at night", "überraschung cat", "nothing here"])
def test_scores_are_those_of_the_formula(query: str) -> None:
    expected = {number: value for number in range(4) if (value := score(query, number)) > 0}
    assert Bm25Index(TEXTS).scores(query) == pytest.approx(expected)


def test_equal_documents_keep_their_order() -> None:
    assert Bm25Index(["b", "a", "a", "a b"]).best("a", 2) == [1, 2]


async def test_the_tool_shows_the_best_passages(tmp_path: Path) -> None:
    rows = [{"text": text, "title": f"T{number}"} for number, text in enumerate(TEXTS)] + [{"text": "cat " * 9}]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = SearchOptions(path=str(tmp_path / "corpus.jsonl"), results=2, passage_chars=12)
    [tool] = CorpusSearch(options).open()
    assert await tool.run({"query": "cat"}) == "[1] cat cat cat  ...\n\n[2] T1\nA dog and a  ..."
    assert await tool.run({"query": "zebra"}) == "No passage has any of these words."


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "is empty"), ('{"text": "a"}\n{bad\n', "line 2: not JSON"), ('{"body": "a"}', "a text under 'text'")],
)
def test_a_bad_corpus_is_refused_with_its_line(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(content)
    with pytest.raises(ConfigError) as raised:
        CorpusSearch(SearchOptions(path=str(tmp_path / "corpus.jsonl"))).open()
    assert words in str(raised.value)
    assert "corpus.jsonl" in str(raised.value)
