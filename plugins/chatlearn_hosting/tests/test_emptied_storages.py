"""Storages that are emptied in place and filled again."""

from __future__ import annotations

import torch

from chatlearn_hosting.engine_side.emptied_storages import EmptiedStorages, storages_of


def test_storages_are_found_once_wherever_their_tensors_are() -> None:
    first, second = torch.zeros(4), torch.zeros(2, 3)
    content = {"a": [first, first[1:], (second.t(), None)], "b": "text", "c": iter([second])}
    assert sorted(storage.nbytes() for storage in storages_of(content)) == [16, 24]


def test_every_view_is_empty_and_comes_back_with_what_it_held() -> None:
    kept, forgotten = torch.arange(6.0), torch.ones(3, dtype=torch.int64)
    view, parameter = kept[2:].view(2, 2), torch.nn.Parameter(kept)
    emptied = EmptiedStorages(storages_of([kept, forgotten, view]), kept=storages_of(kept))
    assert [t.untyped_storage().nbytes() for t in (kept, forgotten, view, parameter)] == [0, 0, 0, 0]
    emptied.fill()
    assert view.tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert parameter.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert forgotten.tolist() == [0, 0, 0]
    view[0, 0] = 9.0
    assert kept[2] == 9.0, "they share their storage as before"


def test_displacements_of_addresses_are_returned() -> None:
    tensor = torch.arange(1000)
    before = tensor[10:].data_ptr()
    emptied = EmptiedStorages(storages_of(tensor), kept=[])
    in_the_way = torch.empty(1000, dtype=torch.int64)
    [(place, moved)] = emptied.fill()
    assert before in place
    assert len(place) == 8000
    assert tensor[10:].data_ptr() == before + moved
    assert in_the_way.numel() == 1000


def test_filling_twice_does_nothing() -> None:
    tensor = torch.arange(3)
    emptied = EmptiedStorages(storages_of(tensor), kept=storages_of(tensor))
    emptied.fill()
    tensor[0] = 7
    assert emptied.fill() == []
    assert tensor.tolist() == [7, 1, 2]
