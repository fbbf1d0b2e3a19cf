"""Bases of a generator's logprobs: checks that its completions state the basis that the generator declares.

A ratio of two probabilities is meaningful only if both belong to the same distribution. Raw generator logprobs combined
with trainer logprobs at temperature 0.7 give weights that look plausible and are wrong in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.compatibility import bases_of
from chatlearn_core.plugins.records import GeneratorSpec
from chatlearn_core.runtime.plan import RolePlan
from chatlearn_core.types import RAW_BASIS, Completion, LogprobBasis, SamplingParams


@dataclass(slots=True, frozen=True)
class DeclaredBases:
    """The bases that a generator declares for its logprobs."""

    role: str
    generator: str
    bases: frozenset[str]
    """``raw`` and ``processed``, see ``GeneratorSpec.bases``."""

    def expected(self, sampling: SamplingParams) -> LogprobBasis:
        """The basis of completions with these sampling parameters."""
        return sampling.basis if "processed" in self.bases else RAW_BASIS

    def check(self, completion: Completion) -> None:
        """Check a completion against the generator's declaration.

        Raises:
            PluginError: the completion states another basis.
        """
        expected = self.expected(completion.sampling)
        if completion.basis == expected:
            return
        stated = "raw" if completion.basis == RAW_BASIS else "processed"
        raise PluginError(
            f"generator {self.generator!r} (role {self.role!r}) returned logprobs of basis {completion.basis} for "
            f"request {completion.request_id}, where {expected} is due: it was sampled with basis "
            f"{completion.sampling.basis}, and the plugin declares {', '.join(sorted(self.bases))} "
            f"(GeneratorSpec.bases). A ratio to the trainer's logprobs would be of two distributions. If the plugin "
            f"means what it returns, declare bases=frozenset({{{stated!r}}}) in its record, or an attribute bases of "
            f"its options; otherwise Completion.basis must be that of the request's sampling"
        )


def declared_bases(role: RolePlan) -> DeclaredBases:
    """The bases that the generator of a role declares with its options."""
    record = role.backend.record
    assert isinstance(record, GeneratorSpec), f"role {role.name} is no generator"
    return DeclaredBases(role.name, record.name, bases_of(record, role.backend.options))
