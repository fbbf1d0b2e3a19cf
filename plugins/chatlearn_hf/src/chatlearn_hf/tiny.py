"""Small random models with a tokenizer, as ordinary Hugging Face directories: for tests, demos and benchmarks."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from chatlearn_hf.progress_bars import no_progress_bars

Family = Literal["qwen3", "qwen2", "llama", "qwen3_moe"]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PAD_TOKEN, START_TOKEN, END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [PAD_TOKEN, START_TOKEN, END_TOKEN]
TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>\n' }}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with tools in the manner of Qwen2.5."""


def build_tiny_tokenizer(
    vocab_size: int = 512, corpus: Sequence[str] | None = None, *, extra_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer with ChatML template, end token ``<|im_end|>`` and padding ``<|endoftext|>``.

    Every byte has a token, so any text round-trips.

    Args:
        vocab_size: upper bound on the vocabulary, including special tokens; at least 259 + ``extra_tokens``.
        corpus: texts from which the merges are learned; None uses sums in words and digits.
        extra_tokens: strings that become single tokens (numbers, for example), whatever the merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(extra_tokens),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus if corpus is not None else _default_corpus(), trainer)
    tokenizer.add_tokens(list(extra_tokens))
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers does not annotate it
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_character_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token for each printable ASCII character and the newline, and the special tokens and
    chat template of ``build_tiny_tokenizer``. Other characters become ``<unk>``.
    """
    tokens = [*SPECIAL_TOKENS, "<unk>", "\n", *map(chr, range(32, 127))]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers does not annotate it
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        unk_token="<unk>",
        additional_special_tokens=[START_TOKEN],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_tiny_model(
    directory: str | Path,
    family: Family = "qwen3",
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 128,
    experts: int = 4,
    max_length: int = 512,
    tie: bool = True,
    tokenizer: PreTrainedTokenizerFast | None = None,
    initializer_range: float = 0.1,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a random float32 causal language model and its tokenizer to ``directory``.

    Norms are drawn around 1 and biases around 0, so that a mistake in either changes the results.

    Args:
        directory: created if missing.
        family: architecture.
        hidden: width; ``hidden / heads`` is the size of an attention head.
        layers: number of decoder layers.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        intermediate: width of the MLP; each expert has half of it.
        experts: number of experts of ``qwen3_moe``, two of them active.
        max_length: ``max_position_embeddings``, tokens.
        tie: whether the head shares the embedding's weight.
        tokenizer: None builds ``build_tiny_tokenizer()``.
        initializer_range: standard deviation of the matrices.
        seed: seed of the weights; the global random state is unchanged.
        **config: further configuration fields of the architecture.

    Returns:
        The directory.
    """
    path = Path(directory)
    tokenizer = tokenizer if tokenizer is not None else build_tiny_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": tie,
        "initializer_range": initializer_range,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family != "qwen2":
        fields["head_dim"] = hidden // heads
    if family == "qwen3_moe":
        fields |= {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": intermediate // 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = AutoConfig.for_model(family, **(fields | config))
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)  # type: ignore[no-untyped-call]  # as above
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                centre = 0.0 if name.endswith("bias") else 1.0
                torch.nn.init.uniform_(parameter, centre - 0.2, centre + 0.2)
    with no_progress_bars():
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def build_tiny_classifier(directory: str | Path, *, num_labels: int = 1, seed: int = 0, **model: Any) -> Path:
    """Write a random float32 sequence classifier and its tokenizer to ``directory``.

    Args:
        directory: created if missing.
        num_labels: number of scores that it gives a text.
        seed: seed of the weights; the global random state is unchanged.
        **model: arguments of ``build_tiny_model``.

    Returns:
        The directory.
    """
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]), no_progress_bars():
        body = build_tiny_model(folder, seed=seed, **model)
        classifier = AutoModelForSequenceClassification.from_pretrained(
            body, num_labels=num_labels, dtype=torch.float32
        )
        torch.nn.init.normal_(classifier.score.weight, generator=torch.Generator().manual_seed(seed + 1))
        classifier.save_pretrained(directory)
        AutoTokenizer.from_pretrained(body).save_pretrained(directory)
    return Path(directory)


def _default_corpus() -> list[str]:
    draw = random.Random(0)
    words = ("sum", "of", "two", "numbers", "plus", "minus", "equals", "answer", "is", "what", "question", "three")
    return [
        " ".join(draw.choices(words, k=8)) + f" {draw.randint(0, 99)} + {draw.randint(0, 99)} = ?" for _ in range(1000)
    ]
