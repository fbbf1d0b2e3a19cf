"""Which layouts of ranks divide a model, the nearest that do, and which of its modules can have adapters.

Imports nothing heavy: a plan is checked with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from chatlearn_megatron.options import MegatronOptions

NUM_NEAREST = 3
"""Number of fitting layouts that a refusal names."""
Layout = tuple[int, int, int, int, int, int]
"""tensor, pipeline, virtual pipeline, context, expert, and expert tensor parallel ranks."""
OPTIONS = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
)


@dataclass(slots=True, frozen=True)
class ModelSizes:
    """What a layout must divide."""

    query_heads: int
    key_heads: int
    layers: int
    vocabulary: int
    widths: Mapping[str, int] = field(default_factory=dict)
    """Further sizes that tensor parallel ranks share, by what they are."""
    experts: int = 0
    expert_width: int = 0


def sizes_of_arguments(arguments: Mapping[str, Any], vocabulary: int) -> ModelSizes:
    """Return the sizes of a model from its fields of ``TransformerConfig``."""
    widths = {"MLP width": int(arguments["ffn_hidden_size"])}
    if arguments.get("multi_latent_attention"):
        widths["latent of keys and values"] = arguments["kv_lora_rank"] + arguments["qk_pos_emb_head_dim"]
        if arguments["q_lora_rank"] is not None:
            widths["latent of queries"] = arguments["q_lora_rank"]
    if arguments.get("moe_shared_expert_intermediate_size"):
        widths["width of the shared experts"] = arguments["moe_shared_expert_intermediate_size"]
    experts = int(arguments.get("num_moe_experts") or 0)
    return ModelSizes(
        query_heads=int(arguments["num_attention_heads"]),
        key_heads=int(arguments["num_query_groups"]),
        layers=int(arguments["num_layers"]),
        vocabulary=vocabulary,
        widths=widths,
        experts=experts,
        expert_width=int(arguments["moe_ffn_hidden_size"]) if experts else 0,
    )


def sizes_of_config(config: Mapping[str, Any]) -> ModelSizes | None:
    """Return the sizes of a model from the content of its ``config.json``; None for a type that only a family knows."""
    kind, vocabulary = config.get("model_type"), config.get("vocab_size")
    arguments: dict[str, Any]
    if not isinstance(vocabulary, int):
        return None
    if kind == "gpt2":
        heads = config["n_head"]
        arguments = {
            "num_attention_heads": heads,
            "num_query_groups": heads,
            "num_layers": config["n_layer"],
            "ffn_hidden_size": config.get("n_inner") or 4 * config["n_embd"],
        }
        return sizes_of_arguments(arguments, vocabulary)
    if kind not in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"):
        return None
    heads = config["num_attention_heads"]
    arguments = {
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "num_layers": config["num_hidden_layers"],
        "ffn_hidden_size": config["intermediate_size"],
        "moe_ffn_hidden_size": config.get("moe_intermediate_size"),
    }
    if kind == "qwen3_moe":
        arguments["num_moe_experts"] = config.get("num_experts", config.get("num_local_experts"))  # older, newer files
    if kind == "deepseek_v3":
        arguments |= {
            "num_query_groups": heads,
            "multi_latent_attention": True,
            "kv_lora_rank": config["kv_lora_rank"],
            "q_lora_rank": config.get("q_lora_rank"),
            "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
            "num_moe_experts": config["n_routed_experts"],
            "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["n_shared_experts"],
        }
    return sizes_of_arguments(arguments, vocabulary)


def adapted_modules(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the last names of a model's modules that can have adapters, from the content of its ``config.json``; None
    for a type that only a family knows.
    """
    kind = config.get("model_type")
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    if kind == "gpt2":
        return "c_attn", "c_proj", "c_fc"
    if kind in ("llama", "mistral", "qwen2", "qwen3"):
        return *attention, "gate_proj", "up_proj", "down_proj"
    if kind == "qwen3_moe":
        return attention
    if kind == "deepseek_v3":
        return ("o_proj",)
    return None


def adapter_problems(options: MegatronOptions, config: Mapping[str, Any]) -> list[str]:
    """Return each target of ``options.lora`` that cannot have an adapter, with those that can."""
    names = adapted_modules(config)
    if options.lora is None or names is None:
        return []
    targets, there = options.lora.target_modules, ", ".join(names)
    if targets == "all-linear":
        has_dense_layers = bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) > 1
        if config["model_type"] != "deepseek_v3" and not has_dense_layers:
            return []
        return [
            "lora.target_modules all-linear includes latent attention, or MLPs of a mixture of experts, which have no"
            f" adapters here; name modules, which may be {there}, or use backend: fsdp"
        ]
    return [
        f"lora.target_modules {target!r} names no linear layer that can have an adapter; it may be {there}"
        for target in targets
        if target.rpartition(".")[-1] not in names
    ]


def layout_of(options: MegatronOptions) -> Layout:
    """Return the sizes that the options set."""
    return (
        options.tensor_parallel,
        options.pipeline_parallel,
        options.virtual_pipeline,
        options.context_parallel,
        options.expert_parallel,
        options.expert_tensor,
    )


def layout_problems(sizes: ModelSizes, layout: Layout, sequence_parallel: bool) -> list[str]:
    """Return each size of the model that a layout does not divide, with the sizes that would."""
    tp, pp, vp, cp, ep, etp = layout
    lines: list[str] = []

    def divides(what: str, number: int, option: str, size: int) -> None:
        if number % size:
            fitting = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
            lines.append(f"{option} {size} does not divide the model's {number} {what}; it may be {fitting}")

    divides("query heads", sizes.query_heads, "tensor_parallel", tp)
    divides("key-value heads", sizes.key_heads, "tensor_parallel", tp)
    if sizes.query_heads % tp == 0:
        divides(f"query heads of each of {tp} tensor parallel ranks", sizes.query_heads // tp, "context_parallel", cp)
    divides("layers", sizes.layers, "pipeline_parallel x virtual_pipeline", pp * vp)
    for what, width in sizes.widths.items():
        divides(what, width, "tensor_parallel", tp)
    if -(-sizes.vocabulary // tp) * (tp - 1) >= sizes.vocabulary:
        lines.append(
            f"tensor_parallel {tp} leaves a rank without a part of the vocabulary of {sizes.vocabulary} tokens"
        )
    if sizes.experts:
        if tp > 1 and not sequence_parallel:
            lines.append(f"tensor_parallel {tp} with experts needs sequence_parallel: true")
        divides("experts", sizes.experts, "expert_parallel", ep)
        divides("expert width", sizes.expert_width, "expert_tensor_parallel", etp)
    elif ep > 1:
        lines.append(f"expert_parallel is {ep}, but the model has no experts; set it to 1")
    return lines


def nearest_layouts(sizes: ModelSizes, wanted: Layout, ranks: int, count: int = NUM_NEAREST) -> list[Layout]:
    """Return the layouts of this many ranks that divide the model and change least: the sum of the factors' binary
    logarithms over all dimensions.
    """

    def change(layout: Layout) -> float:
        return sum(abs(math.log2(new / old)) for new, old in zip(layout, wanted, strict=True))

    return sorted(_fitting(sizes, ranks), key=lambda layout: (round(change(layout), 6), layout))[:count]


def _fitting(sizes: ModelSizes, ranks: int) -> Iterator[Layout]:
    """Yield every layout of this many ranks that divides the model and that the options accept."""
    of_ranks, of_layers = _divisors(ranks), _divisors(sizes.layers)
    for tp, pp, cp, ep in itertools.product(of_ranks, of_ranks, of_ranks, of_ranks if sizes.experts else [1]):
        if ranks % (tp * pp * cp):
            continue
        for vp, etp in itertools.product(of_layers if pp > 1 else [1], _divisors(tp) if sizes.experts else [tp]):
            layout = (tp, pp, vp, cp, ep, etp)
            if ranks % (etp * ep * pp) == 0 and not layout_problems(sizes, layout, sequence_parallel=tp > 1):
                yield layout


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def described(layout: Layout, sizes: ModelSizes) -> str:
    """Return the options of a layout that are not 1."""
    named = dict(zip(OPTIONS, layout, strict=True))
    if not sizes.experts or named["expert_tensor_parallel"] == named["tensor_parallel"]:
        del named["expert_tensor_parallel"]
    shown = [f"{name}: {size}" for name, size in named.items() if size > 1 or name == "expert_tensor_parallel"]
    if sizes.experts and named["tensor_parallel"] > 1:
        shown.append("sequence_parallel: true")
    return "{" + (", ".join(shown) or "data parallel ranks only") + "}"


def refusal(sizes: ModelSizes, options: MegatronOptions, ranks: int) -> list[str]:
    """Return why a layout does not divide a model, and the nearest that do; empty if it does."""
    lines = layout_problems(sizes, layout_of(options), options.sequence_parallel)
    if lines:
        near = nearest_layouts(sizes, layout_of(options), ranks)
        layouts = "; ".join(described(layout, sizes) for layout in near)
        lines.append(f"nearest layouts of {ranks} rank{'s' if ranks > 1 else ''} that fit: {layouts}")
    return lines


def check_model(options: MegatronOptions, config: Mapping[str, Any], ranks: int) -> list[str]:
    """See ``TrainerSpec.check_model``. A family that a plugin adds is checked when the run starts."""
    sizes = sizes_of_config(config)
    return [*(refusal(sizes, options, ranks) if sizes is not None else []), *adapter_problems(options, config)]
