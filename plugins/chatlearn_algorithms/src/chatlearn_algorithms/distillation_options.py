"""Options of on-policy distillation."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from chatlearn_algorithms.role_names import PolicyRole

Divergence = Literal["sampled_reverse_kl", "forward_kl", "reverse_kl", "jsd"]


class StudentRoles(PolicyRole):
    """The roles of an algorithm that learns from teachers."""

    generator: str = Field("generator", description="The generator that samples.")
    environment: str | None = Field(
        None, description="The role of kind environment that makes multi-turn rollouts; null: a single turn."
    )


class DistillationOptions(BaseModel):
    """On-policy distillation (arXiv 2306.13649)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: int = Field(1, ge=1, description="Number of completions sampled for each prompt.")
    teachers: dict[str, list[str]] = Field(
        {"teacher": []},
        min_length=1,
        description="Frozen trainer roles, each with the data sources that it teaches. An empty list means all data"
        " sources, which only a single teacher may have.",
    )
    divergence: Divergence = Field(
        "sampled_reverse_kl",
        description="The minimised divergence. sampled_reverse_kl: the reverse KL on sampled tokens, by policy"
        " gradient."
        " forward_kl, reverse_kl, jsd: over the teacher's most likely tokens, with all other tokens as one class.",
    )
    match: Literal["tokens", "text"] = Field(
        "tokens",
        description="How to compare student and teacher. tokens: token by token; the teachers have the student's"
        " tokenizer. text: over the shortest spans of text that both write in whole tokens; teachers may have any"
        " tokenizer. Needs sampled_reverse_kl.",
    )
    top_k: int = Field(64, ge=1, description="Number of the teacher's most likely tokens to compare.")
    jsd_beta: float = Field(0.5, gt=0, lt=1, description="Weight of the teacher in the mixture of jsd.")
    clip_low: float = Field(0.2, ge=0, lt=1, description="sampled_reverse_kl: the ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0, description="sampled_reverse_kl: the ratio is clipped above 1 + clip_high.")
    aggregation: str = Field("token_mean", description="How to aggregate token losses.")
    aggregation_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of an aggregation that a plugin adds."
    )
    roles: StudentRoles = Field(StudentRoles(), description="Names of the roles in the configuration.")

    @model_validator(mode="after")
    def _settings_agree(self) -> DistillationOptions:
        everything = [name for name, sources in self.teachers.items() if not sources]
        if everything and len(self.teachers) > 1:
            raise ValueError(
                f"teachers.{everything[0]} is an empty list, which means every data source, but there are "
                f"{len(self.teachers)} teachers: name the data sources of each"
            )
        if self.match == "text" and self.divergence != "sampled_reverse_kl":
            raise ValueError(
                f"match is 'text', but divergence {self.divergence!r} compares distributions over one vocabulary: set"
                " divergence to sampled_reverse_kl, or match to tokens with teachers that have the student's tokenizer"
            )
        if self.match == "text" and self.roles.environment is not None:
            raise ValueError(
                f"match is 'text', which covers completions of one turn, but roles.environment is"
                f" {self.roles.environment!r}, whose rollouts may have several: remove roles.environment, or set match"
                " to tokens with teachers that have the student's tokenizer"
            )
        counts = Counter(source for sources in self.teachers.values() for source in set(sources))
        twice = [source for source, count in counts.items() if count > 1]
        if twice:
            raise ValueError(f"data source {twice[0]!r} has {counts[twice[0]]} teachers: name it for one of them")
        return self

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define."""
        environment = self.roles.environment  # the environment names the generators that it uses
        sampler = (self.roles.generator, "generator") if environment is None else (environment, "environment")
        return (sampler, (self.roles.policy, "trainer"), *((teacher, "trainer") for teacher in self.teachers))
