"""Settings for ``chatlearn plugins check chatlearn-megatron``; runs never import this module.

``round_trip`` tests layouts of other distributions, too: set ``round_trips={"megatron":
"chatlearn_megatron.conformance:round_trip"}`` in the suite of a family that registers one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chatlearn_core.protocols import Head, ModelSource, RoleContext
from chatlearn_hf.tiny import build_character_tokenizer
from chatlearn_hf.tiny_architectures import build_tiny
from chatlearn_megatron.plugin import chatlearn_model_families
from chatlearn_testing.suites import ModelCase

MAX_LENGTH = 128
ENGINE_STATE = frozenset(
    f"the environment: {name}" for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
)


def round_trip(layout: Any, directory: Path, head: Head) -> Mapping[str, Tensor]:
    """Read a model directory into Megatron-Core's layers on one rank, and return what they hold by checkpoint name.

    Args:
        layout: a ``chatlearn_megatron.families.MegatronFamily``.
        directory: the model directory.
        head: of the model; one that the checkpoint lacks is drawn.

    Raises:
        ModelError: the checkpoint lacks tensors, or the layout does not hold all of it.
    """
    from chatlearn_megatron.model import build_model  # imports the engine
    from chatlearn_megatron.options import MegatronOptions
    from chatlearn_megatron.parallel import join_ranks
    from chatlearn_megatron.weights import find_holders, read_weights, stream_full

    source = ModelSource(str(directory), str(directory), head)
    options, context = MegatronOptions(), RoleContext("trainer", source)
    ranks = join_ranks(options, context)
    try:
        model = build_model(options, context, source, ranks, layout)
        holders = find_holders(model)
        read_weights(model, source, context.seed)
        return {shard.name: shard.tensor.detach().clone() for shard in stream_full(model, holders)}
    finally:
        ranks.close()


def build_family_model(directory: Path, model_type: str) -> Path:
    """Write a tiny model of a type with random numbers in every tensor, so that one that is lost or moved shows."""
    tokenizer = build_character_tokenizer()
    model = build_tiny(
        model_type,
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    generator = torch.Generator().manual_seed(0)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_(0.0, 0.1, generator=generator)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


RANK_LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"tensor_parallel": 2, "sequence_parallel": True},
    {"pipeline_parallel": 2},
    {"context_parallel": 2},
)

SETTINGS: dict[str, dict[str, Any]] = {
    "trainer/megatron": {
        "build_model": "chatlearn_hf.tiny:build_tiny_model",
        "load_reference": "chatlearn_hf.plain_forward:load_plain_model",
        "rank_layouts": RANK_LAYOUTS,
        "engine_state": ENGINE_STATE,
    },
} | {
    f"model_family/{record.name}": {
        "cases": tuple(
            ModelCase(
                model_type,
                partial(build_family_model, model_type=model_type),
                len(build_character_tokenizer()),
                MAX_LENGTH,
            )
            for model_type in sorted(record.model_types)
        ),
        "round_trips": {"megatron": "chatlearn_megatron.conformance:round_trip"},
    }
    for record in chatlearn_model_families()
}
