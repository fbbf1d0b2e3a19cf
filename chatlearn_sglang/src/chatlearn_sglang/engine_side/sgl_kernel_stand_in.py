"""Stand-in for the package ``sgl_kernel`` on a CPU, with the names that SGLang 0.5.23 imports; SGLang uses two of them.

Of the operators in ``torch.ops.sgl_kernel`` it has only the hash for seeded sampling, so SGLang finds no AMX kernels
and uses torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

__version__ = "0+chatlearn.stand.in"
_MASK = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache locations into its row of the table, in place.

    Args:
        req_pool_indices: [N] row of each request.
        req_to_token: [rows, pool_len] the table.
        start_offset: [N] first column to write.
        end_offset: [N] column after the last one to write.
        out_cache_loc: [sum(end - start)] locations, request by request.
        pool_len: width of the table; only the real kernel uses it, for its strides.
    """
    taken = 0
    for row, start, stop in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = stop - start
        req_to_token[row, start:stop] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (x86, 32 bit) of seed, position and column as 16 bytes, as SGLang's Triton kernel computes it.

    Args:
        seed: [N] below 2**63
        positions: [N]
        col_indices: [M]

    Returns:
        [N, M] uint32
    """
    seeds = seed.to(torch.int64)
    hashed = torch.zeros_like(seeds)
    for block in (seeds & _MASK, (seeds >> 32) & _MASK, positions.to(torch.int64) & _MASK):
        hashed = _mix(hashed, block)
    hashed = _mix(hashed[:, None], (col_indices.to(torch.int64) & _MASK)[None, :])
    hashed = hashed ^ 16  # the input length in bytes
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _MASK
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _MASK
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


def _mix(hashed: Tensor, block: Tensor) -> Tensor:
    block = (_rotate((block * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotate(hashed ^ block, 13) * 5 + 0xE6546B64) & _MASK


def _rotate(value: Tensor, bits: int) -> Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _absent(name: str) -> Callable[..., NoReturn]:
    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's own kernels for CPUs, built from source")

    fail.__name__ = name
    return fail


copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")

# torch.library has no annotations.
_operators = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")  # type: ignore[no-untyped-call]
_operators.impl("murmur_hash32_cpu", murmur_hash32, "CPU")  # type: ignore[no-untyped-call]
