"""Templates with one fault each: edits of their source, as an author might make them."""

from __future__ import annotations

from dataclasses import dataclass

from chatlearn_core.plugins.records import Kind


@dataclass(slots=True, frozen=True)
class SourceMutant:
    """One edit of a template's source."""

    kind: Kind
    name: str
    file: str
    """Module of the template's package."""
    old: str
    """Text that occurs once in the file."""
    new: str
    caught_by: str
    """The contract test that fails; others may fail, too."""
