"""A backend's report on its health, after a call failed or did not return."""

from __future__ import annotations

from chatlearn_core.protocols import Lifecycle


def problem_of(backend: Lifecycle) -> str | None:
    """The result of ``Lifecycle.health``; an exception in it is a problem, too."""
    try:
        return backend.health()
    except Exception as error:
        return f"its health() raised {type(error).__name__}: {error}"


def health_words(problem: str | None) -> str:
    """A sentence for the error of a call that did not return."""
    if problem is None:
        return "Its health check reports no problem."
    return f"It reports of itself (health): {problem}."
