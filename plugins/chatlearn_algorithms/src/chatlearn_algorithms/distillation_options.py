"""Options of on-policy distillation."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from chatlearn_algorithms.role_names import PolicyRole

Divergence = Literal["sampled_reverse_kl", "forward_kl", "reverse_kl", "jsd"]


class StudentRoles(PolicyRole):
    """The roles of an algorithm that samples and is taught."""

    generator: str = Field("generator", description="The role that samples.")
    environment: str | None = Field(
        None, description="The role of kind environment that makes rollouts of several turns; null: one turn."
    )


class DistillationOptions(BaseModel):
    """On-policy distillation (arXiv 2306.13649)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: int = Field(1, ge=1, description="Completions sampled for one prompt.")
    teachers: dict[str, list[str]] = Field(
        {"teacher": []},
        min_length=1,
        description="Frozen trainer roles, each with the data sources that it teaches. An empty list: all of them, "
        "which only a single teacher can.",
    )
    divergence: Divergence = Field(
        "sampled_reverse_kl",
        description="What is made small: the reverse KL on sampled tokens alone, by policy gradient, or a divergence "
        "over the teacher's most likely tokens and the rest of the vocabulary together: forward_kl, reverse_kl or jsd.",
    )
    top_k: int = Field(64, ge=1, description="The teacher's most likely tokens that are compared.")
    jsd_beta: float = Field(0.5, gt=0, lt=1, description="Weight of the teacher in the mixture of jsd.")
    clip_low: float = Field(0.2, ge=0, lt=1, description="sampled_reverse_kl: the ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0, description="sampled_reverse_kl: the ratio is clipped above 1 + clip_high.")
    aggregation: str = Field("token_mean", description="How token losses become one number.")
    aggregation_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of an aggregation that a plugin adds."
    )
    roles: StudentRoles = Field(StudentRoles(), description="What the roles are called, if not as by default.")

    @model_validator(mode="after")
    def _settings_agree(self) -> DistillationOptions:
        everything = [name for name, sources in self.teachers.items() if not sources]
        if everything and len(self.teachers) > 1:
            raise ValueError(
                f"teachers.{everything[0]} is an empty list, which means every data source, but there are "
                f"{len(self.teachers)} teachers: name the data sources of each"
            )
        counts = Counter(source for sources in self.teachers.values() for source in set(sources))
        twice = [source for source, count in counts.items() if count > 1]
        if twice:
            raise ValueError(f"data source {twice[0]!r} has {counts[twice[0]]} teachers: name it for one of them")
        return self

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define."""
        environment = self.roles.environment  # which says itself what generators it uses
        sampler = (self.roles.generator, "generator") if environment is None else (environment, "environment")
        return (sampler, (self.roles.policy, "trainer"), *((teacher, "trainer") for teacher in self.teachers))
