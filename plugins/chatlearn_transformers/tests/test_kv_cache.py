from __future__ import annotations

import pytest
import torch

from chatlearn_transformers.kv_cache import SlotCache, round_up


def states(num_rows, length, seed):
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_rows, 2, length, 4, generator=draw),
        torch.randn(num_rows, 2, length, 4, generator=draw),
    )


def test_rows_keep_their_content_through_growth_and_moves():
    cache = SlotCache()
    cache.reserve(3, 5)
    prompt_keys, prompt_values = states(2, 5, 0)
    cache.expect_prefill(0, torch.tensor([0, 1, 1]), 3)
    cache.update(prompt_keys, prompt_values, 0)

    lengths = torch.tensor([5, 3, 2])  # the second prompt is padded, row 2 shorter still
    cache.reserve(10, 40)
    keys, values = states(3, 1, 1)
    cache.expect_decode(lengths, torch.arange(3), 32)
    all_keys, all_values = cache.update(keys, values, 0)
    assert all_keys.shape == (3, 2, 32, 4)
    for row, (source, length) in enumerate(((0, 5), (1, 3), (1, 2))):
        assert torch.equal(all_keys[row, :, :length], prompt_keys[source, :, :length])
        assert torch.equal(all_values[row, :, :length], prompt_values[source, :, :length])
        assert torch.equal(all_keys[row, :, length], keys[row, :, 0])
    assert torch.isfinite(all_keys).all()

    before = all_keys[2].clone()
    cache.move(torch.tensor([2]), torch.tensor([0]), 6)
    assert torch.equal(all_keys[0, :, :6], before[:, :6])
    assert cache.num_bytes > 0
    cache.clear()
    assert cache.num_bytes == 0


@pytest.mark.parametrize(
    ("needed", "most", "columns"),
    [(36, 68, 96), (36, 128, 128), (36, 129, 64), (36, 0, 64), (100, 40, 128)],
)
def test_room_for_whole_sequences_is_made_at_once_where_it_is_not_much_more(needed, most, columns):
    cache = SlotCache()
    cache.reserve(3, needed, most)
    cache.expect_prefill(0, None, 2)
    cache.update(*states(2, 5, 0), 0)
    assert cache.num_bytes == 2 * 3 * 2 * columns * 4 * 4
    cache.reserve(3, columns)
    assert cache.num_bytes == 2 * 3 * 2 * columns * 4 * 4, "nothing grows"


def test_round_up():
    assert [round_up(n, 32) for n in (1, 32, 33)] == [32, 32, 64]
