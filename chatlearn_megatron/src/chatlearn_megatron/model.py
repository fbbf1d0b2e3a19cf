"""Builds the chunks of a model that this rank holds, and computes packed rows with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from transformers import PreTrainedModel

from chatlearn_core.exceptions import ConfigError, ModelError
from chatlearn_core.protocols import Head, ModelSource, RoleContext
from chatlearn_hf.checkpoint_names import CheckpointLayout, checkpoint_layout
from chatlearn_hf.lora import LoraSettings, adapter_names, adapters
from chatlearn_hf.meta_start import build_on_meta, local_directory
from chatlearn_hf.own_head import trunk_of
from chatlearn_hf.sequence_rope import give_each_sequence_its_rope
from chatlearn_hf.token_outputs import RequestedLogprobs
from chatlearn_hf.varlen_attention import PackedLayout
from chatlearn_losses import TokenLogprobs, default_chunk_tokens, token_logprobs_from_hidden
from chatlearn_megatron import cpu_compatibility
from chatlearn_megatron.adapters import (
    AdaptedColumnLinear,
    AdaptedLinear,
    AdaptedRowLinear,
    adapter_places,
    choose_adapters,
    is_adapter,
)
from chatlearn_megatron.attention import (
    LatentNorm,
    LayerNorm,
    PackedAttention,
    PackedLatentAttention,
    PackedLatentCore,
    PackedRows,
    RMSNorm,
)
from chatlearn_megatron.engine_arguments import native
from chatlearn_megatron.engine_layers import engine_layers, place_name, uses_transformer_engine
from chatlearn_megatron.families import MegatronFamily, family_of
from chatlearn_megatron.layouts import refusal, sizes_of_arguments
from chatlearn_megatron.options import MegatronOptions
from chatlearn_megatron.parallel import MegatronRanks
from chatlearn_megatron.pieces import Heads, Piece, Place, pieces_of, rows_of
from chatlearn_megatron.vocabulary import sharded_logprobs


class PackedGPT(GPTModel):  # type: ignore[misc]  # Megatron-Core is not typed
    """Megatron-Core's model whose forward pass takes packed rows; the last stage returns last hidden states [R, H]."""

    def __init__(self, *args: Any, head: Head, score_bias: bool, padding_id: int | None, **named: Any) -> None:
        super().__init__(*args, **named)
        self.head = head
        if padding_id is not None and self.pre_process:
            self.embedding.word_embeddings.register_forward_hook(partial(_without_gradient_of, padding_id))
        if head != "lm" and self.post_process:
            del self.output_layer
            self.score = nn.Linear(self.config.hidden_size, 1, bias=score_bias, dtype=self.config.params_dtype)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **named: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # The heads' inputs are the same on every tensor parallel rank, and so are their gradients.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states.squeeze(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """See Megatron-Core, whose models expect the output layer that value and reward heads replace."""
        state: Any = super() if self.head == "lm" else super(LanguageModule, self)
        sharded: dict[str, Any] = state.sharded_state_dict(prefix, sharded_offsets, metadata)
        return sharded


@dataclass(slots=True)
class MegatronModel:
    """The chunks of a model on this rank, and what is needed to run and name them."""

    chunks: list[PackedGPT]
    family: MegatronFamily
    hf: PreTrainedModel
    """The whole model on the ``meta`` device: configuration, names and shapes; with adapters, if there are some."""
    layout: CheckpointLayout
    places: Mapping[str, Place]
    head: Head
    ranks: MegatronRanks
    logits_chunk_tokens: int | None
    rotary: nn.Module | None
    shapes: dict[str, tuple[int, ...]] = field(init=False)
    """Shape of every checkpoint tensor by name."""
    adapter_shapes: dict[str, tuple[int, ...]] = field(init=False)
    """Shape of every A and B of the adapters, by peft's name."""

    def __post_init__(self) -> None:
        found = adapters(self.hf)
        self.adapter_shapes = {
            name: tuple(tensor.shape)
            for weight, names in adapter_names(self.hf).items()
            for name, tensor in zip(names, (found[weight].down, found[weight].up), strict=True)
        }
        self.shapes = {
            name: shape for entry in self.layout.tensors for name, shape in zip(entry.names, entry.shapes, strict=True)
        }

    @property
    def config(self) -> TransformerConfig:
        """Megatron-Core's configuration, which its schedules read."""
        return self.chunks[0].config

    @property
    def vocab_size(self) -> int:
        return int(self.hf.config.get_text_config().vocab_size)

    def rows(self, layout: PackedLayout) -> PackedRows:
        """Return what attention needs of a packed row, on the layout's device."""
        rotary = None
        if self.rotary is not None:
            positions = layout.position_ids
            if layout.sharing is not None:
                positions = layout.sharing.split(positions)
            shape = torch.empty(0, dtype=self.config.params_dtype, device=positions.device)
            with torch.no_grad():
                rotary = self.rotary(shape, positions[None])
        return PackedRows(
            layout=layout,
            rotary=rotary,
            windows=_windows(self.hf.config),
            interleaved=bool(getattr(self.hf.config.get_text_config(), "rope_interleave", False)),
        )

    def hidden(self, chunk: nn.Module, token_ids: Tensor, rows: PackedRows) -> Tensor:
        """Run one chunk. Returns the last hidden states [R, H] on the last stage, otherwise what the next one takes."""
        positions = rows.layout.position_ids
        if rows.layout.sharing is not None:
            token_ids, positions = rows.layout.sharing.split(token_ids), rows.layout.sharing.split(positions)
        output: Tensor = chunk(token_ids[None], positions[None], None, packed_seq_params=rows)
        return output

    def score(self, hidden: Tensor) -> Tensor:
        """Return [N] float32 scores of hidden states [N, H]."""
        values: Tensor = self.chunks[-1].score(hidden).squeeze(-1).float()
        return values

    @property
    def head_weight(self) -> nn.Parameter:
        """This rank's rows of the head, on the last stage; the embedding's, or a copy of them, if the two are tied."""
        last = self.chunks[-1]
        tied = last.share_embeddings_and_output_weights
        weight: nn.Parameter = last.shared_embedding_or_output_weight() if tied else last.output_layer.weight
        return weight

    def logprobs(self, hidden: Tensor, labels: Tensor, requested: RequestedLogprobs) -> TokenLogprobs:
        """Return the logprobs of labels [N] after hidden states [N, H]."""
        weight: Tensor = self.head_weight
        shard = self.ranks.shard(expert=False)
        first = shard.rank * weight.shape[0]
        weight = weight[: max(0, min(weight.shape[0], self.vocab_size - first))]
        chunk = self.logits_chunk_tokens or default_chunk_tokens(weight.shape[0], weight.device)
        chunk = min(chunk, max(1, len(hidden)))
        if shard.size > 1:
            return sharded_logprobs(
                hidden, weight, labels, requested, group=self.ranks.tensor, first_id=first, chunk_tokens=chunk
            )
        return token_logprobs_from_hidden(
            hidden,
            weight,
            labels,
            temperature=requested.temperature,
            chunk_tokens=chunk,
            with_entropy=requested.with_entropy,
            recompute=len(hidden) > chunk,
            top_k=requested.top_k,
            selected_ids=requested.selected_ids,
            kept_ids=requested.kept_ids,
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all chunks."""
        for chunk in self.chunks:
            yield from chunk.parameters()

    def trains(self, name: str) -> bool:
        """Whether training changes a parameter of a chunk: adapters alone, if there are some, and a value or reward
        head.
        """
        return not self.adapter_shapes or is_adapter(name) or name.startswith("score.")

    def saves(self, name: str) -> bool:
        """Whether checkpoints hold an entry of a chunk's state: what training changes, but no state of
        TransformerEngine, so that they resume with either kind of layers.
        """
        return self.trains(name) and not name.rpartition(".")[2].startswith("_extra_state")

    def adapter_pieces(self) -> Iterator[Piece]:
        """Yield the parts of the adapters that this rank holds, under peft's names."""
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                if is_adapter(name):
                    yield from self.pieces_of(chunk, name, parameter)

    def pieces(self) -> Iterator[Piece]:
        """Yield the parts of checkpoint tensors that this rank holds: each chunk's parameters, then its buffers."""
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                if is_adapter(name):
                    continue
                owner = chunk.get_submodule(name.rpartition(".")[0])
                adapted = isinstance(owner, AdaptedLinear) and name.endswith(".weight")
                for number, piece in enumerate(self.pieces_of(chunk, name, parameter)):
                    yield dataclasses.replace(piece, adapter=owner.adapter(number)) if adapted else piece
            for name, buffer in chunk.named_buffers():
                if _indices(chunk, name, self.ranks)[1] in self.places:
                    yield from self.pieces_of(chunk, name, buffer)

    def pieces_of(self, chunk: PackedGPT, name: str, values: Tensor) -> list[Piece]:
        """Return the pieces of a parameter's values, or of others of its shape (gradients, moments).

        Raises:
            ModelError: the family has no place for the parameter.
        """
        place, shapes = self.place_of(chunk, name)
        return pieces_of(
            place,
            values,
            shapes,
            self.ranks.shard(expert=place.expert),
            _heads(self.config),
        )

    def place_of(self, chunk: PackedGPT, name: str) -> tuple[Place, list[tuple[int, ...]]]:
        """Return a parameter's place, with indices filled in, and the shapes of its checkpoint tensors.

        Raises:
            ModelError: the family has no place for the parameter, or names a tensor that the checkpoint does not have.
        """
        indices, pattern = _indices(chunk, name, self.ranks)
        place, shapes = self.places.get(pattern), self.adapter_shapes if is_adapter(name) else self.shapes
        if pattern == "output_layer.weight" and place is not None and place.parts[0].name not in shapes:
            # A tied head has no tensor of its own; the last of several stages holds a copy of the embedding.
            place = self.places["embedding.word_embeddings.weight"]
        if place is None:
            raise ModelError(
                f"Megatron-Core's parameter {name} has no place in a checkpoint of {self.hf.config.model_type}; a"
                f" MegatronFamily must describe {pattern}"
            )
        parts = tuple(dataclasses.replace(part, name=part.name.format(**indices)) for part in place.parts)
        if unknown := [part.name for part in parts if part.name not in shapes]:
            raise ModelError(
                f"Megatron-Core's parameter {name} is put together from {', '.join(unknown)}, which a checkpoint of"
                f" {self.hf.config.model_type} does not have; correct {pattern} in the MegatronFamily"
            )
        return dataclasses.replace(place, parts=parts), [shapes[part.name] for part in parts]


def _without_gradient_of(padding_id: int, embedding: Any, ids: tuple[Tensor], output: Tensor) -> Tensor:
    """Let the padding token's embedding learn nothing as an input, like transformers (``Embedding.padding_idx``).

    That embedding is often zero, where a norm's gradient is a thousand times as large as others.
    """
    padded = ids[0] == padding_id
    if embedding.reduce_scatter_embeddings:  # [1, R] tokens give [R / ranks, 1, H]
        padded = padded.t().chunk(embedding.tp_group.size())[embedding.tp_group.rank()]
    return torch.where(padded[..., None], output.detach(), output)


def build_model(
    options: MegatronOptions,
    context: RoleContext,
    source: ModelSource,
    ranks: MegatronRanks,
    family: MegatronFamily | None = None,
) -> MegatronModel:
    """Build this rank's chunks with undefined weights.

    Args:
        options: of the trainer.
        context: of the rank.
        source: the model directory.
        ranks: the joined ranks.
        family: where the parameters lie; None takes the one that a plugin registers for the model's type.

    Raises:
        ModelError: the architecture or an adapter is not supported, or sizes cannot be split over the ranks.
        ConfigError: Megatron-Core refuses the configuration.
        BackendError: TransformerEngine is required, but cannot run.
    """
    hf = build_on_meta(
        local_directory(source.path), source.head, attention="eager", trust_remote_code=source.trust_remote_code
    )
    text = hf.config.get_text_config()
    family = family or family_of(text, source.path)
    arguments = family.arguments(text)
    check_sizes(arguments, int(text.vocab_size), options, source.path, context.world_size)
    device = torch.device(context.device)
    has_latents, has_experts = (bool(arguments.get(name)) for name in ("multi_latent_attention", "num_moe_experts"))
    fused = uses_transformer_engine(options, context, has_latent_attention=has_latents)
    config = _transformer_config(arguments | {"moe_grouped_gemm": fused and has_experts}, options, context)
    layout = checkpoint_layout(hf)
    places = dict(family.places(text))
    if options.lora is not None:
        parts = options.pipeline_parallel * options.virtual_pipeline
        choose_adapters(hf, LoraSettings.of(options.lora), places, int(arguments["num_layers"]), parts, source.path)
        places |= adapter_places(places)
    names = {name for entry in layout.tensors for name in entry.names}
    if source.head != "lm" and "score.weight" not in names:
        raise ModelError(
            f"{type(hf).__name__} names its head otherwise than score: the trainer 'megatron' cannot give"
            f" {source.path} the head {source.head!r}. Use backend: fsdp, or a model of another type"
        )
    tied = bool(text.tie_word_embeddings) and source.head == "lm"
    chunks: list[PackedGPT] = []
    for stage in range(options.virtual_pipeline):
        virtual = stage if options.virtual_pipeline > 1 else None
        with cpu_compatibility.without_cuda_copies(device):
            chunk = PackedGPT(
                config=config,
                transformer_layer_spec=(
                    engine_layers(config, virtual)
                    if fused
                    else _layer_spec(config, virtual, with_adapters=options.lora is not None)
                ),
                vocab_size=-(-int(text.vocab_size) // options.tensor_parallel) * options.tensor_parallel,
                max_sequence_length=int(text.max_position_embeddings),
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
                parallel_output=True,
                share_embeddings_and_output_weights=tied,
                position_embedding_type="none" if family.rotary else "learned_absolute",
                vp_stage=virtual,
                head=source.head,
                score_bias="score.bias" in names,
                padding_id=getattr(hf.get_input_embeddings(), "padding_idx", None),
            )
        if chunk.pre_process and not family.rotary:
            chunk.embedding.position_embeddings.to(config.params_dtype)  # Megatron-Core leaves them in float32
        chunks.append(chunk.to(device))
    rotary = None
    if family.rotary:
        embedding: Any = type(trunk_of(hf).rotary_emb)
        rotary = embedding(config=text).to(device)
        give_each_sequence_its_rope(rotary)
    model = MegatronModel(chunks, family, hf, layout, places, source.head, ranks, options.logits_chunk_tokens, rotary)
    if options.lora is not None:
        _adapt(model, recomputes=options.gradient_checkpointing and context.trainable)
    _mark_split_parameters(model)
    return model


def _adapt(model: MegatronModel, *, recomputes: bool) -> None:
    """Add this rank's parts of the adapters to its layers, with undefined values."""
    wanted, shard, heads = adapters(model.hf), model.ranks.shard(expert=False), _heads(model.config)
    for chunk in model.chunks:
        for name, module in list(chunk.named_modules()):
            if isinstance(module, AdaptedLinear):
                place, _ = model.place_of(chunk, f"{name}.weight")
                module.adapt(place, rows_of(place, module.weight.shape[0], shard, heads), wanted)
        if recomputes and chunk.pre_process:
            # Megatron-Core recomputes only layers whose input has a gradient, which frozen embeddings do not.
            chunk.embedding.register_forward_hook(_with_gradient)


def _with_gradient(_: Any, __: Any, output: Tensor) -> Tensor:
    return output.requires_grad_()


def _mark_split_parameters(model: MegatronModel) -> None:
    """Mark the parameters of which each tensor parallel rank holds another part, as initialisation would have done.

    Megatron-Core counts an unmarked one on the first rank only: the gradient norm, and with it clipping, would be
    wrong.
    """
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            place, _ = model.place_of(chunk, name)
            parameter.tensor_model_parallel = place.kind != "whole"


def check_sizes(arguments: Mapping[str, Any], vocab_size: int, options: MegatronOptions, path: str, ranks: int) -> None:
    """Refuse a layout that does not divide the model, before anything is allocated.

    Raises:
        ModelError: names every size that does not fit, the sizes that do, and the nearest layouts.
    """
    lines = refusal(sizes_of_arguments(arguments, vocab_size), options, ranks)
    if lines:
        raise ModelError(f"{path} cannot be split as the options say:\n" + "\n".join(f"  {line}" for line in lines))


def _transformer_config(
    arguments: Mapping[str, Any], options: MegatronOptions, context: RoleContext
) -> TransformerConfig:
    dtype: torch.dtype = getattr(torch, options.param_dtype)
    recompute: dict[str, Any] = {}
    if options.gradient_checkpointing and context.trainable:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    given: dict[str, Any] = {
        "tensor_model_parallel_size": options.tensor_parallel,
        "pipeline_model_parallel_size": options.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": options.virtual_pipeline if options.virtual_pipeline > 1 else None,
        "context_parallel_size": options.context_parallel,
        "cp_comm_type": "a2a",
        "expert_model_parallel_size": options.expert_parallel,
        "expert_tensor_parallel_size": options.expert_tensor,
        "sequence_parallel": options.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # The interleaved schedule exchanges activations and gradients with the same neighbour if there are two stages.
        # Megatron-Core keeps their order right only with single messages of known lengths.
        "variable_seq_lengths": options.virtual_pipeline == 1,
        "overlap_p2p_comm": options.virtual_pipeline > 1,
        "batch_p2p_comm": options.virtual_pipeline == 1,
        "moe_token_dispatcher_type": "alltoall",  # the only one for rows of varying lengths
        # Losses are parts of a global sum: neither micro-batches nor ranks average.
        "calculate_per_token_loss": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "perform_initialization": False,  # weights are read
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
    }
    try:
        return _config_class(arguments)(**(given | recompute | dict(arguments) | native(context.engine_arguments)))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"roles.{context.role}: Megatron-Core refuses the configuration: {error or type(error).__name__}"
        ) from error


def _config_class(arguments: Mapping[str, Any]) -> type[TransformerConfig]:
    kind: type[TransformerConfig] = TransformerConfig
    if arguments.get("multi_latent_attention"):
        kind = MLATransformerConfig
    return kind


def _layer_spec(config: TransformerConfig, virtual: int | None, *, with_adapters: bool) -> TransformerBlockSubmodules:
    """Return Megatron-Core's local layers of this stage, with the attention and norms of this package, and with linear
    layers that can have adapters.
    """
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=virtual)
    norm = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    for layer in block.layer_specs:
        assert isinstance(layer, ModuleSpec), "a layer of the local specification is a ModuleSpec"
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = norm
        attention = parts.self_attention.submodules
        if with_adapters:
            attention.linear_proj = AdaptedRowLinear
            if not config.multi_latent_attention:
                attention.linear_qkv = AdaptedColumnLinear
            if parts.mlp.module is MLP:
                parts.mlp.submodules.linear_fc1 = AdaptedColumnLinear
                parts.mlp.submodules.linear_fc2 = AdaptedRowLinear
        if config.multi_latent_attention:
            parts.self_attention.module = PackedLatentAttention
            attention.core_attention = PackedLatentCore
            attention.q_layernorm = attention.kv_layernorm = LatentNorm
            continue
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = norm
    block.layer_norm = norm
    return block


def _windows(config: Any) -> tuple[int | None, ...]:
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    if window is None:
        return ()
    if kinds is None:  # Mistral: every layer
        return (int(window),) * int(text.num_hidden_layers)
    windows = tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _heads(config: TransformerConfig) -> Heads:
    return Heads(int(config.num_attention_heads), int(config.num_query_groups), int(config.kv_channels))


def _indices(chunk: PackedGPT, name: str, ranks: MegatronRanks) -> tuple[dict[str, int], str]:
    """Return the indices of layer and expert in the whole model, and the name with placeholders for them, as
    Megatron-Core's own layers have it.
    """
    parts = place_name(name).split(".")
    indices: dict[str, int] = {}
    if parts[:2] == ["decoder", "layers"]:
        offset = get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage)
        indices["layer"], parts[2] = int(parts[2]) + int(offset), "{layer}"
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        per_rank = int(chunk.config.num_moe_experts) // ranks.expert.size()
        indices["expert"], parts[at] = int(parts[at]) + per_rank * ranks.expert.rank(), "{expert}"
    return indices, ".".join(parts)
