"""The layers of TransformerEngine, which Megatron-Core runs instead of its own on GPUs where it is installed.

They fuse a norm into the linear layer after it, and the experts of a rank into one module. Attention stays this
package's, since it takes packed rows. Parameters keep their places: ``place_name`` gives a fused parameter the name
that it has without TransformerEngine.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.protocols import RoleContext
from chatlearn_megatron.attention import PackedAttention
from chatlearn_megatron.options import MegatronOptions

_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_GROUPED_EXPERT = re.compile(r"(.*\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
"""Experts, linear layer, kind, index of the expert on its rank."""


def uses_transformer_engine(options: MegatronOptions, context: RoleContext, *, has_latent_attention: bool) -> bool:
    """Return whether a model gets TransformerEngine's layers.

    Raises:
        BackendError: the option asks for them, but TransformerEngine is not installed or the device is no GPU.
        ConfigError: the option asks for them, but the model has latent attention.
    """
    on_gpu, wanted = torch.device(context.device).type == "cuda", options.transformer_engine
    if not wanted:
        # TransformerEngine multiplies float32 matrices in TF32, which has 10 bits of mantissa.
        fits = options.param_dtype != "float32" and options.lora is None and not has_latent_attention
        return wanted is None and on_gpu and HAVE_TE and fits
    where = f"roles.{context.role}.options.transformer_engine is true, but"
    if has_latent_attention:
        raise ConfigError(f"{where} latent attention runs on Megatron-Core's own layers; set it to null")
    if not on_gpu:
        raise BackendError(f"{where} the device is {context.device}, and TransformerEngine needs a GPU; set it to null")
    if not HAVE_TE:
        raise BackendError(
            f"{where} it is not installed; run: pip install 'chatlearn-megatron[transformer-engine]', or set it to null"
        )
    return True


def engine_layers(config: TransformerConfig, virtual: int | None) -> TransformerBlockSubmodules:
    """Return TransformerEngine's layers of this stage, with the attention of this package."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=virtual)
    for layer in block.layer_specs:
        assert isinstance(layer, ModuleSpec), "a layer of TransformerEngine's specification is a ModuleSpec"
        parts: Any = layer.submodules
        parts.self_attention.submodules.core_attention = PackedAttention
    return block


def place_name(name: str) -> str:
    """Return the name of a parameter as Megatron-Core's own layers have it; other names are returned as they are.

    Examples: ``mlp.linear_fc1.layer_norm_weight`` is ``pre_mlp_layernorm.weight``; ``mlp.experts.linear_fc2.weight3``
    is ``mlp.experts.local_experts.3.linear_fc2.weight``.
    """
    for fused, own in _FUSED_NORMS.items():
        name = name.replace(fused, own)
    found = _GROUPED_EXPERT.fullmatch(name)
    if found is None:
        return name
    experts, layer, kind, expert = found.groups()
    return f"{experts}.local_experts.{expert}.{layer}.{kind}"
