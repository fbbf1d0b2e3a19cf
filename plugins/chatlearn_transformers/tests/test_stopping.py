from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_core.exceptions import ModelError
from chatlearn_hf.tiny import build_tiny_tokenizer
from chatlearn_transformers.stopping import StopStrings, end_of_sequence_ids, token_table

TOKENIZER = build_tiny_tokenizer()


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def first_match(ids, stops):
    """The number of tokens after which a stop string is complete, decoding everything each time."""
    for count in range(1, len(ids) + 1):
        if any(stop in decode(ids[:count]) for stop in stops):
            return count
    return None


def watched_match(ids, stops):
    watcher = StopStrings(stops, decode)
    return next((count for count, token in enumerate(ids, 1) if watcher.feed(token)), None)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="ab é漢🙂\n<|im_end|>", min_size=1, max_size=30),
    stops=st.lists(st.text(alphabet="ab é漢🙂\n", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_matches_exactly_when_the_whole_text_would(text, stops):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert watched_match(ids, stops) == first_match(ids, stops)


def test_match_over_many_tokens():
    ids = TOKENIZER.encode("the answer is 42\nQuestion: what", add_special_tokens=False)
    count = watched_match(ids, ["\nQuestion:"])
    assert "\nQuestion:" in decode(ids[:count])
    assert "\nQuestion:" not in decode(ids[: count - 1])


def test_every_source_of_end_of_sequence_counts():
    found = end_of_sequence_ids(
        SimpleNamespace(eos_token_id=1), SimpleNamespace(eos_token_id=[2, 3]), SimpleNamespace(eos_token_id=None), 10
    )
    assert found == {1, 2, 3}
    assert token_table(found, 5).tolist() == [False, True, True, True, False]


def test_foreign_end_of_sequence_is_refused():
    with pytest.raises(ModelError, match=r"tokenizer: eos_token_id is 10, outside the model's vocabulary of 10"):
        end_of_sequence_ids(SimpleNamespace(), None, SimpleNamespace(eos_token_id=10), 10)
