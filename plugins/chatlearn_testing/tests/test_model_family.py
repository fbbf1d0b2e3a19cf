"""The suite for model families on the fake one."""

from __future__ import annotations

from chatlearn_testing.fakes.bigram import MAX_LENGTH
from chatlearn_testing.fakes.records import BIGRAM_FAMILY
from chatlearn_testing.suites import ModelCase, ModelFamilyConformance


class TestBigramFamily(ModelFamilyConformance):
    backend = BIGRAM_FAMILY
    has_tokenizer_files = False
    cases = (ModelCase("bigram", "chatlearn_testing.fakes.bigram:build_bigram_model", 32, MAX_LENGTH),)
