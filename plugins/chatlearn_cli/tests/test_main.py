from __future__ import annotations

import pytest

import chatlearn_core
from chatlearn_cli import main as cli
from chatlearn_core.exceptions import ConfigError, Interrupted


@pytest.fixture
def failing_command(monkeypatch: pytest.MonkeyPatch):
    """Makes ``chatlearn eval`` raise."""

    def install(error: BaseException) -> None:
        def evaluate() -> None:
            raise error

        monkeypatch.setattr("chatlearn_cli.lazy.load_callable", lambda record, attribute, origin: evaluate)

    monkeypatch.delenv("CHATLEARN_TRACEBACK", raising=False)
    return install


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_version(capsys) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"chatlearn {chatlearn_core.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("run.yaml, line 3: no"), 2, "error: run.yaml, line 3: no\n"),
        (Interrupted("stopped"), 130, "stopped\n"),  # asked for, so it is no error
    ],
)
def test_errors_of_chatlearn_are_printed_without_a_traceback(
    failing_command, capsys, error, code: int, said: str
) -> None:
    failing_command(error)
    assert exit_code("eval") == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", said)


def test_a_traceback_on_request(failing_command, monkeypatch) -> None:
    failing_command(ConfigError("no"))
    monkeypatch.setenv("CHATLEARN_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        cli.main(["eval"])


def test_a_bug_keeps_its_traceback(failing_command) -> None:
    failing_command(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["eval"])


def test_wrong_usage(capsys) -> None:
    assert exit_code("plugins", "shw") == 2
    assert "show" in capsys.readouterr().err
    assert exit_code("--verson") == 2


def test_the_installed_script_runs_this(fake_environment) -> None:
    done = fake_environment.python(
        "-c",
        "from importlib.metadata import entry_points; "
        "(script,) = entry_points(group='console_scripts', name='chatlearn'); print(script.value)",
    )
    assert done.stdout.strip() == f"{cli.__name__}:main"


@pytest.mark.parametrize("arguments", [("plugins", "list"), ("--help",)])
def test_looking_around_imports_nothing_heavy(fake_environment, arguments) -> None:
    """Pydantic is not among them: some versions of Typer convert options with it."""
    done = fake_environment.python(
        "-c",
        "import sys, atexit; from chatlearn_cli.main import main;"
        "heavy = ('torch', 'numpy', 'transformers', 'omegaconf', 'yaml');"
        "atexit.register(lambda: print([name for name in heavy if name in sys.modules], file=sys.stderr));"
        f"main({list(arguments)!r})",
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")
