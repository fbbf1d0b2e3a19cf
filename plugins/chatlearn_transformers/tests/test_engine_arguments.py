from __future__ import annotations

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_hf.engine_arguments import PASSED
from chatlearn_transformers.engine_arguments import OWNED, check_engine_arguments


def test_known_arguments_pass():
    assert check_engine_arguments("generator", {"revision": "main"}) == {"revision": "main"}
    assert not PASSED.keys() & OWNED.keys()


def test_a_value_of_another_type_is_refused():
    # transformers takes a text for true.
    with pytest.raises(ConfigError, match="local_files_only: must be of type bool, but is 'no'"):
        check_engine_arguments("generator", {"local_files_only": "no"})


def test_every_wrong_argument_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        check_engine_arguments("actor", {"revison": "x", "device_map": "auto", "zzz": 1})
    message = str(caught.value)
    assert "roles.actor.engine" in message
    assert "revison: unknown; did you mean 'revision'?" in message
    assert "device_map: owned by the backend; the runtime places the role" in message
    assert "zzz: unknown\n" in message
