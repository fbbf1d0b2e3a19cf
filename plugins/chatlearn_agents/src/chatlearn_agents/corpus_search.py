"""Tool ``search``: passages of a local file, ranked by BM25 (Robertson and Zaragoza, "The Probabilistic Relevance
Framework: BM25 and Beyond", 2009, equation 3.15), with Lucene's inverse document frequency, which is never negative.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatlearn_agents.options import SearchOptions
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import Tool

K1, B = 1.5, 0.75
"""Saturation of the term frequency, and strength of the length normalisation: customary values."""
_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """The terms of a text: its words in lower case."""
    return _WORD.findall(text.casefold())


@dataclass(slots=True, frozen=True)
class Passage:
    """A passage of the corpus."""

    title: str
    text: str


class Bm25Index:
    """An inverted index in memory.

    Args:
        texts: the documents, by their position.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        lengths = []
        for number, text in enumerate(texts):
            counts = Counter(words_of(text))
            lengths.append(counts.total())
            for word, count in counts.items():
                self._postings[word].append((number, count))
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        self._size = len(lengths)
        self._norms = [K1 * (1 - B + B * length / mean) for length in lengths]

    def scores(self, query: str) -> dict[int, float]:
        """Score of each document that has a word of the query."""
        scores: dict[int, float] = defaultdict(float)
        for word in dict.fromkeys(words_of(query)):
            postings = self._postings.get(word, [])
            idf = math.log(1 + (self._size - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, count in postings:
                scores[number] += idf * count * (K1 + 1) / (count + self._norms[number])
        return dict(scores)

    def best(self, query: str, results: int) -> list[int]:
        """Documents by descending score; earlier documents first among equals."""
        scores = self.scores(query)
        return heapq.nsmallest(results, scores, key=lambda number: (-scores[number], number))


class CorpusSearch:
    """The source of the search tool."""

    def __init__(self, options: SearchOptions) -> None:
        self._options = options

    def open(self) -> Sequence[Tool]:
        """Read and index the corpus; see ``ToolSource``."""
        options = self._options
        passages = self._passages()
        index = Bm25Index([f"{one.title}\n{one.text}" for one in passages])
        schema = {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "Words to look for."}},
            "required": ["query"],
            "additionalProperties": False,
        }

        async def run(arguments: Mapping[str, Any]) -> str:
            found = index.best(arguments["query"], options.results)
            shown = [self._shown(rank, passages[number]) for rank, number in enumerate(found, 1)]
            return "\n\n".join(shown) or "No passage has any of these words."

        return [Tool(options.name, options.description, schema, run)]

    def close(self) -> None:
        """Nothing to release."""

    def _shown(self, rank: int, passage: Passage) -> str:
        limit = self._options.passage_chars
        text = passage.text if len(passage.text) <= limit else f"{passage.text[:limit]} ..."
        return f"[{rank}] {passage.title}\n{text}" if passage.title else f"[{rank}] {text}"

    def _passages(self) -> list[Passage]:
        options, passages = self._options, list[Passage]()
        where = f"tool {options.name!r} (kind search)"
        try:
            with Path(options.path).open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        passages.append(_passage(line, f"{where}: {options.path}, line {number}", options))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: {options.path} cannot be read: {error}") from error
        if not passages:
            raise ConfigError(f"{where}: {options.path} is empty; each line is an object with a text")
        return passages


def _passage(line: str, where: str, options: SearchOptions) -> Passage:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    text = row.get(options.text) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"{where}: it must be an object with a text under {options.text!r}, not {line.strip():.60}")
    title = row.get(options.title) if options.title else None
    return Passage(title if isinstance(title, str) else "", text)
