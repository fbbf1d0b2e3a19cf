"""The template's launcher with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

CASES = "test_cases_can_tell_right_from_wrong"
PART = "test_every_process_learns_its_part"
ONE_HEAD = "test_a_cluster_has_one_head"
OTHERS = "test_other_environments_are_none_of_its_own"
RECOGNISED = "test_it_is_recognised_as_declared"
MISSING = "test_a_missing_variable_is_named"
NUMBERS = "test_what_is_no_number_is_named"
RANGE = "test_ranks_out_of_range_are_refused"
READS = "test_it_reads_the_given_variables_alone"
READ_ONLY = "test_the_environment_is_read_only"
AS_IT_WAS = "test_the_process_stays_as_it_was"

RESULT = 'return NodePart(rank, num_nodes, read_text(environment, "JOB_HEAD"))'
FOREIGN = 'if "JOB_COMPLETION_INDEX" not in environment:'
RANK = 'rank = read_number(environment, "JOB_COMPLETION_INDEX")'
COUNT = 'num_nodes = read_number(environment, "JOB_COMPLETIONS")'
SET = "if not environment.get(name):"
NOT_SET = 'raise ConfigError(f"the environment variable {name} is not set; set it in the manifest of the Job")'
VALUE = "return environment[name]"
IS_NUMBER = "if not (text.isascii() and text.isdecimal()):"
NO_NUMBER = 'raise ConfigError(f"the environment variable {name} is {text!r}; it must be a whole number, 0 or more")'
BEYOND = "if rank >= num_nodes:"


def _launcher(name: str, caught_by: str, old: str, new: str, *also: tuple[str, str]) -> SourceMutant:
    return SourceMutant("launcher", name, "launcher.py", old, new, caught_by, also)


def _record(name: str, caught_by: str, old: str, new: str) -> SourceMutant:
    return SourceMutant("launcher", name, "plugin.py", old, new, caught_by)


def _first(statement: str) -> str:
    """A statement after the process is recognised."""
    return f"{statement}\n    {RANK}"


MUTANTS = (
    _launcher("ranks_from_the_end", PART, RESULT, RESULT.replace("(rank,", "(num_nodes - 1 - rank,")),
    _launcher("every_node_is_the_head", ONE_HEAD, RESULT, RESULT.replace("(rank,", "(0,")),
    _launcher("ranks_from_one", ONE_HEAD, RESULT, RESULT.replace("(rank,", "(rank + 1,")),
    _launcher("ranks_are_texts", PART, RESULT, RESULT.replace("(rank,", "(str(rank),")),
    _launcher("a_node_more", PART, RESULT, RESULT.replace("num_nodes,", "num_nodes + 1,")),
    _launcher("the_rank_counts_nodes", ONE_HEAD, RESULT, RESULT.replace("num_nodes,", "rank + 1,")),
    _launcher("the_head_is_the_own_host", ONE_HEAD, RESULT, RESULT.replace("JOB_HEAD", "HOSTNAME")),
    _launcher("the_head_has_a_port", PART, RESULT, RESULT.replace(', "JOB_HEAD")', ', "JOB_HEAD") + ":6379"')),
    _launcher("the_local_rank_is_the_rank", PART, RESULT, RESULT.replace('"))', '"), rank)')),
    _launcher("a_tuple", PART, RESULT, RESULT.replace("NodePart(", "(")),
    _launcher("never_recognised", PART, FOREIGN, "if environment:"),
    _launcher("every_process_is_its_own", OTHERS, FOREIGN, "if not environment:"),
    _launcher("every_pod_is_its_own", OTHERS, FOREIGN, 'if "KUBERNETES_SERVICE_PORT" not in environment:'),
    _launcher("an_empty_environment_is_an_error", OTHERS, FOREIGN, f"environment['PATH']\n    {FOREIGN}"),
    _launcher(
        "others_are_an_error",
        OTHERS,
        f"{FOREIGN}\n        return None",
        f"{FOREIGN}\n        raise ConfigError('no Job')",
    ),
    _launcher("recognised_by_the_count", RECOGNISED, FOREIGN, 'if "JOB_COMPLETIONS" not in environment:'),
    _record(
        "declares_a_variable_more", RECOGNISED, '("JOB_COMPLETION_INDEX",)', '("JOB_COMPLETION_INDEX", "JOB_HEAD")'
    ),
    _record("declares_no_variable", CASES, '("JOB_COMPLETION_INDEX",)', "()"),
    _record("declares_a_variable_of_others", CASES, '("JOB_COMPLETION_INDEX",)', '("SLURM_NODEID",)'),
    _launcher(
        "a_missing_count_is_one",
        MISSING,
        COUNT,
        ('num_nodes = read_number(environment, "JOB_COMPLETIONS") if "JOB_COMPLETIONS" in environment else rank + 1'),
    ),
    _launcher("a_missing_head_is_localhost", MISSING, NOT_SET, "return 'localhost'"),
    _launcher("a_missing_variable_is_a_key_error", MISSING, SET, "if False:"),
    _launcher(
        "a_missing_variable_is_no_launcher",
        MISSING,
        FOREIGN,
        ('if not {"JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", "JOB_HEAD"} <= environment.keys():'),
    ),
    _launcher("an_empty_variable_is_there", MISSING, SET, "if name not in environment:"),
    _launcher("the_missing_variable_is_not_named", MISSING, "variable {name} is not set", "variable is not set"),
    _launcher("what_int_reads_is_a_number", NUMBERS, IS_NUMBER, "if not text.strip(' +_').replace('_', '').isdigit():"),
    _launcher("digits_of_other_scripts", NUMBERS, IS_NUMBER, "if not text.isdecimal():"),
    _launcher("superscripts", NUMBERS, IS_NUMBER, "if not text.isdigit():"),
    _launcher("no_number_is_a_value_error", NUMBERS, NO_NUMBER, "pass"),
    _launcher("no_number_is_zero", NUMBERS, NO_NUMBER, "return 0"),
    _launcher("the_wrong_variable_is_not_named", NUMBERS, "variable {name} is {text!r}", "variable is {text!r}"),
    _launcher("negative_numbers", NUMBERS, IS_NUMBER, "if not (text.isascii() and text.lstrip('-').isdecimal()):"),
    _launcher("ranks_are_not_bounded", RANGE, BEYOND, "if False:"),
    _launcher("a_rank_may_be_the_count", RANGE, BEYOND, "if rank > num_nodes:"),
    _launcher("a_rank_beyond_is_wrapped", RANGE, BEYOND, ("rank %= num_nodes\n    if False:")),
    _launcher(
        "the_rank_beyond_is_not_named", RANGE, "variable JOB_COMPLETION_INDEX is {rank}, and", "variable is {rank}, and"
    ),
    _launcher("reads_its_own_environment", READS, VALUE, "return os.environ.get(name, environment[name])"),
    _launcher(
        "its_own_environment_is_recognised",
        READS,
        FOREIGN,
        ('if "JOB_COMPLETION_INDEX" not in {**os.environ, **environment}:'),
    ),
    _launcher("writes_a_file", READS, RANK, _first("Path(tempfile.mkdtemp(), 'node').write_text('')")),
    _launcher(
        "remembers_the_first",
        PART,
        RESULT,
        ('KEPT.append(NodePart(rank, num_nodes, read_text(environment, "JOB_HEAD")))\n    return KEPT[0]'),
    ),
    _launcher("takes_a_variable_out", READ_ONLY, RANK, _first("environment.pop('KUBERNETES_SERVICE_PORT', None)")),
    _launcher("adds_a_variable", READ_ONLY, RANK, _first("environment['MASTER_ADDR'] = '10.0.0.1'")),
    _launcher("changes_its_own_environment", READ_ONLY, RANK, _first("os.environ['ACME_HEAD'] = '1'")),
    _launcher("needs_a_dict", READ_ONLY, RANK, _first("json.dumps(environment)")),
    _launcher("prints", AS_IT_WAS, RANK, _first("print('acme')")),
    _launcher("seeds_are_global", AS_IT_WAS, RANK, _first("random.seed(0)")),
    _launcher("changes_the_directory", AS_IT_WAS, RANK, _first("os.chdir('/')")),
)
