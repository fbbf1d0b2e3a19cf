"""The fake that expands media, its format and the family of its models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chatlearn_core.exceptions import BackendError, DataError, ModelError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.types import GenerateRequest, Media, SamplingParams
from chatlearn_testing.fakes.bigram import build_bigram_model
from chatlearn_testing.fakes.family import BigramFamily
from chatlearn_testing.fakes.media_format import MediaFormat
from chatlearn_testing.fakes.media_generator import PLACEHOLDER, ROUTES, MediaGenerator, routed_experts
from chatlearn_testing.fakes.options import FakeGeneratorOptions, FakeOptions

TWO = (Media("image", bytes([0, 24])), Media("image", bytes([25])))
"""Their tokens are 1 and 25, and 1."""


@pytest.fixture
def generator(tmp_path: Path) -> MediaGenerator:
    source = ModelSource(str(build_bigram_model(tmp_path)), str(tmp_path))
    made = MediaGenerator(FakeGeneratorOptions(), RoleContext("sampler", source))
    made.setup()
    return made


def request(prompt: list[int], media: tuple[Media, ...] = TWO, max_tokens: int = 6) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest("r", np.array(prompt), sampling, media=media)


async def test_media_take_the_place_of_their_placeholders_and_every_token_has_its_routes(
    generator: MediaGenerator,
) -> None:
    made = await generator.generate(request([5, PLACEHOLDER, 6, PLACEHOLDER]))
    assert made.prompt_ids is not None
    assert made.prompt_ids.tolist() == [5, 1, 25, 6, 1]
    whole = routed_experts(np.concatenate([made.prompt_ids, made.token_ids]))
    assert whole.shape == (11, 3, 2)
    assert whole[10, 2, 1] == (made.token_ids[-1] * 7 + 10 * 3 + 2 * 5 + 1) % 11
    np.testing.assert_array_equal(np.concatenate([made.prompt_token_data[ROUTES], made.token_data[ROUTES]]), whole)


async def test_a_completion_goes_on_and_a_further_turn_is_left_alone(generator: MediaGenerator) -> None:
    asked = request([5, PLACEHOLDER, 6, PLACEHOLDER])
    whole = await generator.generate(asked)
    part = await generator.generate(replace(asked, sampling=replace(asked.sampling, max_tokens=2)))
    resumed = await generator.generate(replace(asked, resume_from=part))
    for name in ("token_ids", "prompt_ids", "logprobs"):
        np.testing.assert_array_equal(getattr(resumed, name), getattr(whole, name))
    np.testing.assert_array_equal(resumed.token_data[ROUTES], whole.token_data[ROUTES])
    with pytest.raises(BackendError, match="without its token data"):
        await generator.generate(replace(asked, resume_from=replace(part, prompt_token_data={})))
    wrong = {ROUTES: part.prompt_token_data[ROUTES] + 1}
    with pytest.raises(BackendError, match="other experts of its prompt"):
        await generator.generate(replace(asked, resume_from=replace(part, prompt_token_data=wrong)))
    further = await generator.generate(request([5, 1, 25, 6, 1, 9, 4]))
    assert further.prompt_ids is not None
    assert further.prompt_ids.tolist() == [5, 1, 25, 6, 1, 9, 4]


async def test_as_many_media_as_placeholders(generator: MediaGenerator) -> None:
    with pytest.raises(BackendError, match=r"has 1 placeholders \(token 26\) and 2 media"):
        await generator.generate(request([5, PLACEHOLDER]))


def test_rows_hold_media_in_hex() -> None:
    row_format = MediaFormat(FakeOptions())
    assert [one.content for one in row_format.parse({"prompt": "z", "media": ["00ff"]}).media] == [b"\x00\xff"]
    for wrong, message in (("no", "bytes in hex"), ("", "a medium is empty")):
        with pytest.raises(DataError, match=message):
            row_format.parse({"prompt": "z", "media": [wrong]})


def test_the_family_reads_a_letter_a_token(tmp_path: Path) -> None:
    family, source = BigramFamily(FakeOptions()), ModelSource(str(build_bigram_model(tmp_path)), str(tmp_path))
    assert (family.facts(source).vocab_size, family.model_type(source)) == (32, "bigram")
    tokenizer = family.load_tokenizer(source)
    renderer = family.renderer(tokenizer)
    assert renderer.prompt("abz").token_ids.tolist() == [1, 2, PLACEHOLDER]
    assert renderer.demonstration("a", "b").completion_ids.tolist() == [2, 0]
    assert tokenizer.decode([1, 0, 2], skip_special_tokens=True) == "ab"
    for text, message in (("a b", "' ' has no token"), ("", "the prompt is empty")):
        with pytest.raises(DataError, match=message):
            renderer.prompt(text)
    with pytest.raises(ModelError, match="not that of a bigram model"):
        family.facts(ModelSource(str(tmp_path / "nowhere"), ""))
