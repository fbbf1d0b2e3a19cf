from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from chatlearn_sglang.engine_side.cpu_stand_ins import SGL_KERNEL_FILE, StandInFinder


def murmur3_x86_32(data: bytes) -> int:
    """MurmurHash3 by Austin Appleby, as published, for whole four-byte blocks."""
    mask, hashed = 0xFFFFFFFF, 0
    for start in range(0, len(data), 4):
        block = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & mask
        block = ((block << 15) | (block >> 17)) & mask
        hashed ^= block * 0x1B873593 & mask
        hashed = ((hashed << 13) | (hashed >> 19)) & mask
        hashed = (hashed * 5 + 0xE6546B64) & mask
    hashed ^= len(data)
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B & mask
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35 & mask
    return hashed ^ (hashed >> 16)


def test_the_hash_equals_the_published_one() -> None:
    assert murmur3_x86_32(b"test") == 0xBA6BD213  # from the reference implementation


@pytest.fixture(scope="module")
def stand_in():
    """The module, found as SGLang's ``import sgl_kernel`` finds it."""
    spec = StandInFinder().find_spec("sgl_kernel")
    assert spec is not None
    assert spec.origin == str(SGL_KERNEL_FILE)
    module = type(sys)("sgl_kernel")
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


def test_the_operator_hashes_seed_position_and_token(stand_in) -> None:
    seeds = torch.tensor([0, 1, 2**40 + 7, 2**63 - 1])
    positions = torch.tensor([0, 5, 2**31, 17])
    columns = torch.tensor([0, 1, 151_000])
    found = torch.ops.sgl_kernel.murmur_hash32_cpu.default(seeds.to(torch.uint64), positions, columns)
    assert found.dtype == torch.uint32
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for column, token in enumerate(columns.tolist()):
            data = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + token.to_bytes(4, "little")
            assert int(found[row, column]) == murmur3_x86_32(data)


def test_cache_locations_go_to_each_requests_own_columns(stand_in) -> None:
    table = torch.zeros(3, 6, dtype=torch.int32)
    rows, starts, stops = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([3, 4])
    stand_in.assign_req_to_token_pool_cpu(rows, table, starts, stops, torch.arange(10, 16), 6)
    assert table.tolist() == [[12, 13, 14, 15, 0, 0], [0] * 6, [0, 10, 11, 0, 0, 0]]


def test_an_absent_kernel_raises_when_called(stand_in) -> None:
    with pytest.raises(NotImplementedError, match="verify_tree_greedy_cpu needs SGLang's own kernels"):
        stand_in.verify_tree_greedy_cpu()


def test_stand_ins_are_installed_on_a_cpu_alone() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import engine_side\n"
        "print([type(f).__name__ for f in sys.meta_path].count('StandInFinder'), 'torch' in sys.modules)"
    )
    for value, expected in (("1", "1 False"), ("0", "0 False")):
        found = subprocess.run(
            [sys.executable, "-c", code, str(SGL_KERNEL_FILE.parents[1])],
            capture_output=True,
            text=True,
            check=True,
            env={"SGLANG_USE_CPU_ENGINE": value},
        )
        assert found.stdout.strip() == expected


def test_pinned_tensors_are_ordinary_where_pinning_is_impossible() -> None:
    code = (
        "import torch; from chatlearn_sglang.engine_side.cpu_stand_ins import do_without_pinned_memory as do_without\n"
        "do_without()\n"
        "print(torch.tensor([1, 2], pin_memory=True).pin_memory().tolist(), torch.zeros(1, pin_memory=True).tolist())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[1, 2] [0.0]"
