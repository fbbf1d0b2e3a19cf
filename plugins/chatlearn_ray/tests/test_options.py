from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from chatlearn_core.config.load import load_config
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_ray.options import RayRuntimeOptions


def checked(placements: dict[str, Any], **options: Any) -> RayRuntimeOptions:
    """As a configuration with the roles trainer and generator is checked."""
    return RayRuntimeOptions.model_validate(
        {"roles": placements, **options}, context={"roles": frozenset({"trainer", "generator"})}
    )


@pytest.mark.parametrize(
    ("placements", "rule"),
    [
        ({"trainer": {"pool": "gpu"}}, "trainer.pool is 'gpu', but runtime.options.pools has 'gpus'; define it there"),
        ({"judge": {"cpus": 2}}, "'judge' is not a role of the configuration, which has 'generator', 'trainer'"),
        (
            {"trainer": {"near": "judge"}},
            "trainer.near is 'judge'; it must be 'none' or one of 'generator', 'trainer'",
        ),
    ],
)
def test_a_name_that_nothing_has_is_refused(placements: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValidationError) as caught:
        checked(placements, pools={"gpus": {"slots": 4}})
    assert rule in str(caught.value)


def test_names_that_something_has_are_taken() -> None:
    placements = {"trainer": {"pool": "gpus", "near": "none"}, "generator": {"near": "trainer"}}
    assert set(checked(placements, pools={"gpus": {"slots": 4}}).roles) == set(placements)


def test_without_a_configuration_roles_are_not_checked() -> None:
    assert RayRuntimeOptions(roles={"judge": {"near": "critic"}}).roles["judge"].near == "critic"


def test_a_configuration_is_refused_with_file_key_and_value(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("runtime:\n  backend: ray\n  options:\n    roles:\n      judge: {cpus: 2}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:4: runtime\.options\.roles: 'judge' is not a role"):
        load_config(file, (), discover_plugins())
