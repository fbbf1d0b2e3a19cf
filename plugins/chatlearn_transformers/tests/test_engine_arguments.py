from __future__ import annotations

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_transformers.engine_arguments import OWNED, PASSED, check_engine_arguments


def test_known_arguments_pass():
    assert check_engine_arguments("generator", {"revision": "main"}) == {"revision": "main"}
    assert not PASSED & OWNED.keys()


def test_every_wrong_argument_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        check_engine_arguments("actor", {"revison": "x", "device_map": "auto", "zzz": 1})
    message = str(caught.value)
    assert "roles.actor.engine" in message
    assert "revison: unknown; did you mean 'revision'?" in message
    assert "device_map: owned by the backend; the runtime places the role" in message
    assert "zzz: unknown\n" in message
