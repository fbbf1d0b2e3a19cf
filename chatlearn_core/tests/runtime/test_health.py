from __future__ import annotations

from typing import Any

from chatlearn_core.runtime.health import health_words, problem_of


class Backend:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def health(self) -> str | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        answer: str | None = self.answer
        return answer


def test_what_a_backend_says_becomes_a_sentence() -> None:
    healthy: Any = Backend(None)
    ill: Any = Backend("its process 7 was killed")
    broken: Any = Backend(OSError("no such process"))
    assert health_words(problem_of(healthy)) == "Its health check reports no problem."
    assert health_words(problem_of(ill)) == "It reports of itself (health): its process 7 was killed."
    assert problem_of(broken) == "its health() raised OSError: no such process"
