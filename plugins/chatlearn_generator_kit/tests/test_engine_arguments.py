import subprocess
import sys

from chatlearn_generator_kit.engine_arguments import owned_problems, refused


def test_owned_arguments_are_named_with_what_to_set_instead() -> None:
    problems = owned_problems(
        {"dtype": "float16", "seed": 1}, {"dtype": "set options.dtype", "model": "set model.path"}
    )
    assert problems == {"dtype": "owned by the backend; set options.dtype"}
    text = refused("actor", "acme.Engine", problems)
    assert text == (
        "roles.actor.engine holds arguments that cannot be passed to acme.Engine:\n"
        "  dtype: owned by the backend; set options.dtype"
    )
    assert refused("actor", "acme.Engine", ["a: b"]).endswith("\n  a: b")


def test_a_configuration_is_checked_without_torch() -> None:
    code = "import sys, chatlearn_generator_kit.engine_arguments; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
