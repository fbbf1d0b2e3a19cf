from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.types.boxes import BoxCover, box_text, extent, full_box, lies_in, num_elements, overlap, slices

SHAPE = (4, 3)
INTERVALS = [(a, b) for a in range(5) for b in range(a, 5)]


@st.composite
def boxes(draw):
    return tuple((a, b) for a, b in (sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in SHAPE))


def marked(box):
    marks = torch.zeros(SHAPE, dtype=torch.int64)
    marks[slices(box)] = 1
    return marks


@given(boxes(), boxes())
def test_the_overlap_is_what_two_boxes_share(one, other):
    shared = overlap(one, other)
    expected = marked(one) * marked(other)
    assert torch.equal(marked(shared) if shared is not None else torch.zeros_like(expected), expected)


@given(st.lists(boxes(), max_size=6))
def test_a_cover_takes_each_element_once_and_knows_which_are_missing(given_boxes):
    cover, taken = BoxCover(SHAPE), torch.zeros(SHAPE, dtype=torch.int64)
    for box in given_boxes:
        refusal = cover.add(box)
        assert (refusal is not None) == bool((taken * marked(box)).any())
        if refusal is None:
            taken += marked(box)
    left = torch.zeros(SHAPE, dtype=torch.int64)
    for box in cover.missing():
        left += marked(box)
    assert torch.equal(left + taken, torch.ones(SHAPE, dtype=torch.int64))
    assert cover.is_complete == bool((taken == 1).all())


def test_a_scalar_is_one_box():
    cover = BoxCover(())
    assert (full_box(()), num_elements(()), cover.is_complete, cover.missing()) == ((), 1, False, [()])
    assert cover.add(()) is None
    assert cover.is_complete
    assert cover.add(()) == "elements [] came twice"


def test_words():
    cover = BoxCover((4, 8))
    assert cover.add(((0, 2), (0, 9))) == "box [0:2, 0:9] does not lie in shape [4, 8]"
    cover.add(((0, 2), (0, 8)))
    assert cover.add(((1, 3), (4, 8))) == "elements [1:2, 4:8] came twice"
    assert [box_text(box) for box in cover.missing()] == ["[2:4, 0:8]"]


def test_an_empty_box_is_no_element_of_anything():
    cover = BoxCover((2,))
    assert cover.add(((1, 1),)) is None
    assert cover.add(((0, 2),)) is None
    assert cover.is_complete


def test_boxes_of_other_rank_or_beyond_the_shape_do_not_lie_in_it():
    assert all(lies_in((one, other), (4, 4)) for one, other in itertools.product(INTERVALS, INTERVALS))
    assert not lies_in(((0, 1),), (4, 4))
    assert not lies_in(((2, 1), (0, 1)), (4, 4))
    assert extent(((1, 3), (0, 2))) == (2, 2)
