"""A Hugging Face tokenizer passes as the core's tokenizer as it is, and the arithmetic vocabulary covers its texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chatlearn_algorithms.example_kinds import Demonstrations
from chatlearn_chat import ChatTemplateRenderer
from chatlearn_core.config.models import DataConfig
from chatlearn_core.data import Tokenizer, build_dataset
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.types import Demonstration
from chatlearn_data.answers import last_boxed
from chatlearn_data.arithmetic import PIECE, demonstration_records, problems, vocabulary
from chatlearn_data.output import write_records

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def word_tokenizer() -> Any:
    special = ["<unk>", "<eos>", "<|user|>", "<|assistant|>"]
    words = {word: index for index, word in enumerate([*special, *vocabulary()])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PIECE.pattern), behavior="removed", invert=True)
    model.pre_tokenizer = split
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=special[2:],
        chat_template=TEMPLATE,
    )


def test_demonstrations_from_a_word_level_tokenizer(word_tokenizer: Any, tmp_path: Path) -> None:
    tokenizer: Tokenizer = word_tokenizer
    path = tmp_path / "sft.parquet"
    write_records(path, demonstration_records(problems(max_operand=20), "sft", 60, 0))
    config = DataConfig.model_validate({"train": [{"path": str(path)}]})
    examples = build_dataset(
        config,
        ChatTemplateRenderer(tokenizer),
        discover_plugins(),
        kind=Demonstrations(),
        max_prompt_tokens=64,
        max_length=96,
    )
    unknown = word_tokenizer.unk_token_id
    assert len(examples) == 60
    for example in examples:
        assert isinstance(example, Demonstration)
        prompt, completion = example.prompt.token_ids.tolist(), example.completion_ids.tolist()
        assert unknown not in [*prompt, *completion]
        assert prompt == word_tokenizer.apply_chat_template(
            example.prompt.messages, add_generation_prompt=True, return_dict=False
        )
        assert completion[-1] == word_tokenizer.eos_token_id
        answer = last_boxed(tokenizer.decode(completion, skip_special_tokens=True))
        assert answer is not None
        assert answer.replace(" ", "") == example.prompt.ground_truth
