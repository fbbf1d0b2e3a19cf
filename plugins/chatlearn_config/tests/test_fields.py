from typing import Annotated

import pytest
from pydantic import BaseModel, Field

from chatlearn_config.fields import model_at, valid_keys
from chatlearn_core.config import models


class Aliased(BaseModel):
    lambda_: float = Field(0.9, alias="lambda")
    nested: Annotated[models.SamplingConfig | None, Field()] = None


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ((), models.RunConfig),
        (("data", "train", 0), models.DatasetConfig),
        (("roles", "any"), models.RoleConfig),
        (("roles", "any", "model"), models.ModelConfig),
        (("roles", "any", "parts", 3), models.RewardPart),
        (("roles", "any", "options"), None),
        (("roles", "any", "options", "x"), None),
        (("train", "steps"), None),
        (("nope", "x"), None),
    ],
)
def test_model_at(path: tuple, model: type | None) -> None:
    assert model_at(models.RunConfig, path) is model


def test_aliases_are_what_a_file_writes() -> None:
    assert valid_keys(Aliased) == ["lambda", "nested"]
    assert model_at(Aliased, ("nested",)) is models.SamplingConfig
