"""The template's command with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

FORM = "test_the_name_and_the_help_are_well_formed"
NAME = "test_no_other_command_has_the_name"
IMPORT = "test_importing_it_imports_no_engine"
HELP = "test_help_explains_the_command"
OPTIONS = "test_options_are_explained"
UNKNOWN = "test_unknown_options_are_refused"
NOTHING = "test_nothing_is_left_behind"
PLAIN = "test_narrow_terminals_and_plain_ones_are_served"

RECORD_NAME = 'name="acme",'
RECORD_HELP = 'help="Show the last metrics of a run.",'
TYPER = "import typer"
DEFINE = "def last_metrics("
RUN_DIR = 'run_dir: Annotated[Path, typer.Argument(help="The directory of a run.")],'
PREFIX = 'typer.Option(help="Show only metrics whose names begin with this.")'


def _record(name: str, caught_by: str, old: str, new: str) -> SourceMutant:
    return SourceMutant("cli_command", name, "plugin.py", old, new, caught_by)


def _command(name: str, caught_by: str, old: str, new: str) -> SourceMutant:
    return SourceMutant("cli_command", name, "command.py", old, new, caught_by)


MUTANTS = (
    _record("no_help", FORM, RECORD_HELP, ""),
    _record("help_without_a_full_stop", FORM, RECORD_HELP, RECORD_HELP.replace("run.", "run")),
    _record("help_of_several_lines", FORM, RECORD_HELP, RECORD_HELP.replace("the last", "\\nthe last")),
    _record("a_name_with_a_space", FORM, RECORD_NAME, 'name="acme metrics",'),
    _record("a_name_in_capitals", FORM, RECORD_NAME, 'name="Acme",'),
    _record("the_name_of_the_command_line", NAME, RECORD_NAME, 'name="run",'),
    _record("the_name_of_another_plugin", NAME, RECORD_NAME, 'name="plugins new",'),
    _command("imports_transformers", IMPORT, TYPER, f"import transformers\n{TYPER}"),
    _command("prints_when_it_is_imported", IMPORT, DEFINE, f'print("loaded")\n\n\n{DEFINE}'),
    _command("fails_when_it_is_imported", IMPORT, DEFINE, f'raise OSError("no device")\n\n\n{DEFINE}'),
    _command("warns_on_every_line", HELP, DEFINE, f'print("deprecated", file=sys.stderr)\n\n\n{DEFINE}'),
    _command("an_option_without_help", OPTIONS, PREFIX, "typer.Option()"),
    _command(
        "takes_every_option",
        UNKNOWN,
        DEFINE,
        "last_metrics = typer.Typer(context_settings={'ignore_unknown_options': True, 'allow_extra_args': True}, "
        "help='Show the last metrics of a run.', invoke_without_command=True)\n\n\n"
        "@last_metrics.callback(context_settings={'ignore_unknown_options': True, 'allow_extra_args': True})\n"
        "def shown(",
    ),
    _command(
        "another_exit_code",
        UNKNOWN,
        DEFINE,
        "if '--no-such-option' in sys.argv:\n    print('no-such-option', "
        f"file=sys.stderr)\n    sys.exit(1)\n\n\n{DEFINE}",
    ),
    _command("a_file_in_the_working_directory", NOTHING, DEFINE, f'Path("acme.log").write_text("")\n\n\n{DEFINE}'),
    _command("a_folder_in_the_home_directory", NOTHING, DEFINE, f'Path.home().joinpath(".acme").mkdir()\n\n\n{DEFINE}'),
    _command(
        "a_process_stays",
        NOTHING,
        DEFINE,
        f'subprocess.Popen(["sleep", "30"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n\n\n{DEFINE}',
    ),
    _command(
        "needs_a_wide_terminal", PLAIN, DEFINE, f'assert int(os.environ.get("COLUMNS", "80")) >= 80\n\n\n{DEFINE}'
    ),
)
