"""Every mutant of a template's source, whatever the kind."""

from __future__ import annotations

import aggregation_mutants
import algorithm_mutants
import cli_command_mutants
import dataset_mutants
import decision_mutants
import environment_mutants
import example_kind_mutants
import flow_method_mutants
import generator_mutants
import launcher_mutants
import logger_mutants
import model_family_mutants
import output_mutants
import reader_mutants
import reward_mutants
import rollout_mode_mutants
import sampler_mutants
import tool_mutants
import trainer_mutants
import weight_sync_mutants
from source_mutants import SourceMutant

MUTANTS: tuple[SourceMutant, ...] = (
    *aggregation_mutants.MUTANTS,
    *(
        SourceMutant("algorithm", m.name, f"{m.file}.py", m.old, m.new, m.caught_by, m.also)
        for m in algorithm_mutants.MUTANTS
    ),
    *cli_command_mutants.MUTANTS,
    *dataset_mutants.MUTANTS,
    *decision_mutants.MUTANTS,
    *environment_mutants.MUTANTS,
    *example_kind_mutants.MUTANTS,
    *flow_method_mutants.MUTANTS,
    *generator_mutants.MUTANTS,
    *launcher_mutants.MUTANTS,
    *logger_mutants.MUTANTS,
    *model_family_mutants.MUTANTS,
    *output_mutants.MUTANTS,
    *reader_mutants.MUTANTS,
    *reward_mutants.MUTANTS,
    *rollout_mode_mutants.MUTANTS,
    *sampler_mutants.MUTANTS,
    *tool_mutants.MUTANTS,
    *trainer_mutants.MUTANTS,
    *weight_sync_mutants.MUTANTS,
)
