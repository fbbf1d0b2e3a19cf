"""The suite for model families on the one that reads every directory of transformers."""

from __future__ import annotations

from chatlearn_hf.conformance import SETTINGS
from chatlearn_testing.suites import ModelFamilyConformance


class TestTransformersFamily(ModelFamilyConformance):
    backend = "transformers"
    cases = SETTINGS["model_family/transformers"]["cases"]
